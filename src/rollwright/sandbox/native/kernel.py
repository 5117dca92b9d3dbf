"""Linux system calls that Python does not offer: namespaces, mounts, capabilities.

Role: the hands of `template`, `zygote` and `inside`. Neighbours: they run without site-packages. Invariants:
standard library only; every failure is an `OSError` that says which call it was; numbers are those of
linux/sched.h, linux/mount.h and, for calls that glibc has no wrapper for, of the generic system call table
(x86-64 where it differs).
"""

from __future__ import annotations

import ctypes
import os

# PyDLL keeps the interpreter's lock held: a child of `clone` wakes up holding it, as a child of `fork` does
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

NEWNS, NEWUTS, NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
NEWUSER, NEWPID, NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
SLAVE, SHARED = 1 << 19, 1 << 20
DETACH = 2
"""Of `unmount`: now, whoever still uses it."""

_X86 = os.uname().machine == "x86_64"
_CLONE, _PIVOT_ROOT, _UNSHARE, _SETNS = (56, 155, 272, 308) if _X86 else (220, 41, 97, 268)
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_TREE_CLONE, _EMPTY_FROM, _EMPTY_PATH = 1, 4, 0x1000
_SIGCHLD, _PARENT = 17, 0x8000
_SET_DUMPABLE, _SET_PDEATHSIG = 4, 1


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)


def clone(flags: int) -> int:
    """As `os.fork`, into new namespaces: 0 in the child. The caller must have no other thread; what libraries
    registered with `pthread_atfork` does not run."""
    return _checked(_libc.syscall(_CLONE, ctypes.c_ulong(flags | _SIGCHLD), None, None, None, None), "clone")


def fork_beside() -> int:
    """As `os.fork`, with the handlers of Python's, but the child is this process's parent's. What libraries
    registered with `pthread_atfork` does not run."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    try:
        pid = clone(_PARENT)
    except OSError:
        api.PyOS_AfterFork_Parent()
        raise
    if pid:
        api.PyOS_AfterFork_Parent()
    else:
        api.PyOS_AfterFork_Child()
    return pid


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked(_libc.syscall(_UNSHARE, ctypes.c_ulong(flags)), "unshare")


def enter(descriptor: int, kind: int) -> None:
    """Move this process into the namespace of that descriptor."""
    _checked(_libc.syscall(_SETNS, descriptor, kind), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """See mount(2)."""
    result = _libc.mount(
        source and source.encode(),
        target.encode(),
        kind and kind.encode(),
        ctypes.c_ulong(flags),
        data and data.encode(),
    )
    _checked(result, f"mount {kind or source or ''} on {target}")


def unmount(target: str) -> None:
    """Take the topmost mount of `target` away, also where it is in use."""
    _checked(_libc.umount2(target.encode(), DETACH), f"unmount {target}")


def pivot() -> None:
    """Make the working folder, a mount of this namespace's own, the root, and forget the old one."""
    _checked(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def tree(path: str) -> int:
    """A descriptor of a copy of the mount at `path`, attached nowhere; it lives as long as the descriptor."""
    flags = _TREE_CLONE | os.O_CLOEXEC
    return _checked(_libc.syscall(_OPEN_TREE, -100, path.encode(), flags), f"open_tree {path}")


def protect(path: str) -> None:
    """Make the mount at `path` and all below it read-only, without devices and set-user-id programs."""
    flags, attributes = 0x8000, (7).to_bytes(8, "little") + bytes(24)  # AT_RECURSIVE; RDONLY | NOSUID | NODEV
    _checked(
        _libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, attributes, 32), f"mount_setattr {path}"
    )


def attach(descriptor: int, target: str) -> None:
    """Mount what `tree` gave, read-only."""
    # struct mount_attr: set RDONLY | NOSUID | NODEV
    _checked(
        _libc.syscall(
            _MOUNT_SETATTR, descriptor, b"", _EMPTY_PATH, (7).to_bytes(8, "little") + bytes(24), 32
        ),
        "mount_setattr",
    )
    put_on(descriptor, target)


def put_on(descriptor: int, target: str) -> None:
    """Mount what `tree` gave, as it is."""
    _checked(
        _libc.syscall(_MOVE_MOUNT, descriptor, b"", -100, target.encode(), _EMPTY_FROM),
        f"move_mount {target}",
    )


def map_ids(folder: str, uid: tuple[int, int], gid: tuple[int, int]) -> None:
    """Say in `folder`, a process's below /proc, which (inner, outer) user and group its user namespace
    has."""
    put(f"{folder}/setgroups", "deny")
    put(f"{folder}/uid_map", f"{uid[0]} {uid[1]} 1")
    put(f"{folder}/gid_map", f"{gid[0]} {gid[1]} 1")


def put(path: str, text: str) -> None:
    """Write into a file of the kernel's."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may look into this one."""
    _checked(_libc.prctl(_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
