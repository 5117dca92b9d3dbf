"""The root that every native sandbox is a copy of.

Role: builds it once, before the zygote gives up the host's files. Neighbours: `zygote` calls it and pivots
into it. Invariants: standard library only; nothing of the host is in it but what is listed, read-only,
without set-user-id programs and devices (but for the listed ones); agents' processes see only what is below
`USER`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from rollwright.sandbox.native import kernel

USER = "/user"
"""What agents' processes have as their root."""
WORK = "/work"
"""The working folder, below `USER`."""
LAYERS = "/layers"
"""Where sealed layers of other sandboxes are attached."""
OWN = "/own"
"""Where a sandbox's own files are: its layers and its /tmp."""
PIVOT = "/pivot"
"""Where the zygote binds the template to, to take it as its root."""
UID = 1000
"""The user inside."""

_FILES = {
    "/etc/passwd": f"agent:x:{UID}:{UID}::{WORK}:/bin/sh\n",
    "/etc/group": f"agent:x:{UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": "/tmp",
}


def build(root: str, readable: Iterable[str], devices: Iterable[str], owner: int) -> None:
    """Mount the template on the folder `root`, in this process's mount namespace. `owner` is the user and
    group, as this process names them, that sandboxes run as."""
    kernel.mount(None, "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("rollwright", root, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=755,size=1m")
    for folder in (LAYERS, OWN, PIVOT, "/proc", USER):
        os.mkdir(root + folder)
    inside = root + USER
    for folder in (WORK, "/tmp", "/proc", "/dev", "/etc"):
        os.mkdir(inside + folder)
    for path in (root + OWN, inside + WORK, inside + "/tmp"):
        os.chown(path, owner, owner)
    for path, text in _FILES.items():
        with open(inside + path, "w") as file:
            file.write(text)
    for path, target in _LINKS.items():
        os.symlink(target, inside + path)
    for path in sorted(readable):
        if not os.path.lexists(inside + path):  # else it lies in one that is there
            _show(path, inside + path)
    for path in devices:
        with open(inside + path, "w"):
            pass
        kernel.mount(path, inside + path, None, kernel.BIND)
    kernel.mount(
        None, root, None, kernel.BIND | kernel.REMOUNT | kernel.RDONLY | kernel.NOSUID | kernel.NODEV
    )


def _show(path: str, target: str) -> None:
    """Have the host's `path` in the template too."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        with open(target, "w"):
            pass
    kernel.mount(path, target, None, kernel.BIND | kernel.RECURSIVE)
    kernel.protect(target)
