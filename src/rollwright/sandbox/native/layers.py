"""A sandbox's files as layers: sealed ones below, one on top that takes the writes.

Role: mounts them, seals the top one, puts others in their place. Neighbours: `inside` calls it, `ground`
keeps track of sealed layers on the host's side. Invariants: all that a sandbox writes lies in one tmpfs,
whose size and number of files are its limits; a sealed layer is never written again, or the snapshot is a
copy.

A layer is named by its folder in the tmpfs, or, where it is another sandbox's, by its path below `LAYERS`.
Overlay mounts: linux/Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from rollwright.sandbox import files
from rollwright.sandbox.native import kernel, template

_FLAGS = kernel.NOSUID | kernel.NODEV
DEEPEST = 24
"""Layers above each other at most; a deeper snapshot is a copy, so that looking a file up stays cheap."""


class Layers:
    """The layers of one sandbox, which began with `lowers` of others. `always` mounts an overlay even over
    nothing: it knows its writers wherever they reach it."""

    def __init__(self, limits: dict[str, Any], lowers: list[str], *, always: bool = False) -> None:
        self._limits, self._always = limits, always
        self._lowers = [f"{template.LAYERS}/{name}" for name in lowers]
        """Paths of sealed layers, the newest first."""
        self._made = 0
        self._target = template.USER + template.WORK

    def mount(self) -> None:
        """Make the tmpfs and the working folder."""
        limits = self._limits
        data = f"mode=700,size={limits['disk_bytes']},nr_inodes={limits['files'] + 3 + 4 * self._always}"
        kernel.mount("sandbox", template.OWN, "tmpfs", _FLAGS, data)
        os.mkdir(f"{template.OWN}/tmp", 0o700)
        kernel.mount(f"{template.OWN}/tmp", template.USER + "/tmp", None, kernel.BIND)
        self._cover()

    def _cover(self) -> None:
        """A new top layer on what there is."""
        self._top = f"{template.OWN}/{self._made}"
        self._made += 1
        os.mkdir(self._top, 0o700)
        if not self._lowers and not self._always:  # as good as an overlay, and cheaper
            kernel.mount(self._top, self._target, None, kernel.BIND)
            return
        work = f"{self._top}-work"
        os.mkdir(work, 0o700)
        below = self._lowers or [self._nothing()]
        layers = f"lowerdir={':'.join(below)},upperdir={self._top},workdir={work},userxattr"
        kernel.mount("work", self._target, "overlay", _FLAGS, layers)

    def _nothing(self) -> str:
        """An empty folder."""
        path = f"{template.OWN}/nothing"
        os.makedirs(path, 0o500, exist_ok=True)
        return path

    def rotate(self) -> dict[str, Any]:
        """Seal what there is. Gives its layers, the newest first, and whether the working folder has `moved`
        on to a new top layer. Where a program has a file open for writing it has not: a copy is sealed, and
        the program goes on writing to its own."""
        if self._lowers and not os.listdir(self._top):  # nothing was written since
            return {"layers": [self._name(path) for path in self._lowers], "moved": False}
        frozen = self._frozen()
        shallow = frozen and len(self._lowers) < DEEPEST
        try:
            sealed = [self._top, *self._lowers] if shallow else [self._copied()]
        except OSError:
            if frozen:
                self._remount(0)
            raise
        if frozen:
            kernel.unmount(self._target)
            self._lowers = sealed
            self._cover()
        return {"layers": [self._name(path) for path in sealed], "moved": frozen}

    def _copied(self) -> str:
        """A layer that holds what there is. Raises `OSError` where there is no room for it; nothing of it
        stays then."""
        copy = f"{template.OWN}/{self._made}"
        self._made += 1
        import shutil  # large, and few sandboxes come here

        try:
            shutil.copytree(self._target, copy, symlinks=True, ignore=_special)
        except (OSError, RecursionError) as error:
            files.remove_tree(copy)
            raise OSError(errno.ENOSPC, f"its files could not be copied: {error}"[:500]) from error
        return copy

    def _frozen(self) -> bool:
        """Make the working folder read-only; False where somebody writes."""
        try:
            self._remount(kernel.RDONLY)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def _remount(self, flags: int) -> None:
        bind = 0 if self._lowers or self._always else kernel.BIND
        kernel.mount(None, self._target, None, kernel.REMOUNT | _FLAGS | bind | flags)

    @staticmethod
    def _name(path: str) -> str:
        """`own/…` for a layer of this sandbox, else where it is below `LAYERS`."""
        own = path.startswith(f"{template.OWN}/")
        return path.removeprefix("/" if own else f"{template.LAYERS}/")

    def restore(self, lowers: list[str]) -> None:
        """Put others, named as `rotate` gives them, in the place of what there is; no program runs. What was
        written since the last seal is deleted."""
        kernel.unmount(self._target)
        for path in (self._top, f"{self._top}-work"):
            files.remove_tree(path)
        files.empty_tree(template.USER + "/tmp")
        own = template.OWN.removeprefix("/") + "/"
        self._lowers = [
            f"/{name}" if name.startswith(own) else f"{template.LAYERS}/{name}" for name in lowers
        ]
        self._cover()


def _special(folder: str, names: list[str]) -> list[str]:
    """What is neither file nor folder nor link."""
    found = []
    for name in names:
        path = os.path.join(folder, name)
        if not (os.path.islink(path) or os.path.isfile(path) or os.path.isdir(path)):
            found.append(name)
    return found
