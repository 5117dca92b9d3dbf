"""Memory cgroups, one for each sandbox, where this process may make them.

Role: makes `memory` a limit of all processes of a sandbox together. Neighbours: `provider` owns the parent
group and writes it down for the reaper. Invariants: a group that could not be limited is not used; a group is
removed with its sandbox, or by the reaper.

Both versions of the interface: linux/Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollwright.clock import Clock

_ROOT = Path("/sys/fs/cgroup")
_PATIENCE = 200
"""Milliseconds at most until a dead process has left its group."""


@dataclass(frozen=True)
class _Interface:
    limits: tuple[str, ...]
    """Files that take the limit in bytes, in order; those after the first may be missing."""
    events: str


_FIRST = _Interface(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control")
_SECOND = _Interface(("memory.max",), "memory.events")


class Group:
    """One sandbox's. Its processes enter by writing 0 to `descriptor`."""

    def __init__(self, folder: Path, interface: _Interface, limit: int, clock: Clock) -> None:
        self._folder, self._interface, self._clock = folder, interface, clock
        folder.mkdir()
        self._seen = 0
        try:
            for number, name in enumerate(interface.limits):
                if number == 0 or (folder / name).exists():
                    (folder / name).write_text(str(limit))
            if interface is _SECOND and (folder / "memory.swap.max").exists():
                (folder / "memory.swap.max").write_text("0")
            self.descriptor = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            folder.rmdir()
            raise

    def killed(self) -> bool:
        """Whether the kernel has killed something in it since this was asked last."""
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)", (self._folder / self._interface.events).read_text(), re.M)
            if found is not None and int(found[1]) > self._seen:
                self._seen = int(found[1])
                return True
        return False

    async def remove(self) -> None:
        """Its processes are dead. What cannot be removed yet is left to the parent's `close`."""
        os.close(self.descriptor)
        for _ in range(_PATIENCE):
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                await self._clock.sleep(0.001)
            else:
                return


class Groups:
    """The parent of a provider's groups."""

    def __init__(self, folder: Path, interface: _Interface, clock: Clock) -> None:
        self.folder, self._interface, self._clock = folder, interface, clock

    def new(self, name: str, limit: int) -> Group:
        """A group of at most `limit` bytes. Raises `OSError` where it cannot be made."""
        return Group(self.folder / name, self._interface, limit, self._clock)

    def close(self) -> None:
        """Remove what is empty."""
        for folder in [*self.folder.glob("*/"), self.folder]:
            with contextlib.suppress(OSError):
                folder.rmdir()


def groups(name: str, clock: Clock, made: Callable[[Path], None]) -> Groups | None:
    """A parent group of that name below this process's own; None where it may make none. `made` is told of it
    before it is there."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            interface = _SECOND if number == "0" else _FIRST
            base = _ROOT / ("" if number == "0" else "memory")
            folder = base / path.lstrip("/") / name
            with contextlib.suppress(OSError):
                made(folder)
                folder.mkdir()
                with contextlib.suppress(OSError):
                    if interface is _SECOND:
                        (folder / "cgroup.subtree_control").write_text("+memory")
                try:
                    trial = Group(folder / "trial", interface, 2**24, clock)
                except OSError:
                    folder.rmdir()
                    continue
                os.close(trial.descriptor)
                (folder / "trial").rmdir()
                return Groups(folder, interface, clock)
    return None
