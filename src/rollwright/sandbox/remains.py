"""Cgroups, mounts and folders that a dead owner left, and their removal.

Role: the reaper's hands. Neighbours: `owners` says what belongs to whom, `processes` ends what runs.
Invariants: nothing is deleted through a link or a mount: a folder below which one could not be taken away
stays; only a cgroup's own folder is removed, and never one that this process is in; whatever is gone already
counts as done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Collection
from pathlib import Path

from rollwright.clock import Clock
from rollwright.sandbox import processes
from rollwright.sandbox.files import remove_tree

_DETACH, _NO_FOLLOW = 2, 8
_ROUNDS, _ROUND_SECONDS = 250, 0.02
"""A cgroup is rid of its processes within 5 s, or stays for the next reaper."""


def mounts_below(folders: Collection[Path], besides: Collection[Path] = ()) -> list[Path]:
    """Mount points at or below one of `folders` and not at or below one of `besides`, deepest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        place = Path(os.fsdecode(_plain(line.split(b" ")[4])))
        if _within(place, folders) and not _within(place, besides):
            found.append(place)
    return sorted(found, key=lambda place: -len(place.parts))


def _plain(text: bytes) -> bytes:
    """A path of mountinfo as it is: blanks, newlines and backslashes stand there in octal."""
    first, *rest = text.split(b"\\")
    return first + b"".join(bytes((int(each[:3], 8),)) + each[3:] for each in rest)


def _within(place: Path, folders: Collection[Path]) -> bool:
    return any(place == folder or folder in place.parents for folder in folders)


def is_straight(folder: Path) -> bool:
    """Whether that is a folder, named without a link on the way."""
    return folder.is_dir() and folder.resolve() == folder


def unmount(place: Path) -> bool:
    """Take one mount away, also where it is in use; whether that went."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.umount2(os.fsencode(place), _DETACH | _NO_FOLLOW) == 0)


def unmount_below(folders: Collection[Path], besides: Collection[Path] = ()) -> int:
    """Take away every mount at or below `folders`, but not those at or below `besides`; how many."""
    return sum(unmount(place) for place in mounts_below(folders, besides))


def remove_folder(folder: Path) -> bool:
    """Delete a folder with all that is in it; whether it is gone by this call. A link and a folder with a
    mount in it stay."""
    if folder.is_symlink() or not folder.is_dir() or mounts_below([folder.resolve()]):
        return False
    remove_tree(folder)
    return True


def remove_cgroup(path: Path, clock: Clock) -> int:
    """Remove a cgroup (of either version) and those in it, innermost first, after their processes; how many
    cgroups went. One that is busy or ours stays."""
    try:
        below = [entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()]
    except OSError:
        return 0
    gone = sum(remove_cgroup(each, clock) for each in below)
    if not (path / "cgroup.procs").is_file() or os.getpid() in _members(path):
        return gone
    _write(path / "pids.max", "0")  # nothing in it forks any more
    _write(path / "freezer.state", "THAWED")  # what is frozen in a cgroup of version 1 does not die
    for _ in range(_ROUNDS):
        if not _write(path / "cgroup.kill", "1"):
            processes.end(_members(path), lambda pid: pid in _members(path))
        try:
            path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:  # gone meanwhile, or not ours to remove
                return gone
            clock.pause(_ROUND_SECONDS)  # a killed process is still in it
        else:
            return gone + 1
    return gone


def _members(path: Path) -> set[int]:
    try:
        return {int(line) for line in (path / "cgroup.procs").read_text().split()} - {0}  # 0: out of sight
    except OSError:
        return set()


def _write(path: Path, text: str) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # never makes a file
        try:
            os.write(descriptor, text.encode())
            return True
        finally:
            os.close(descriptor)
    return False
