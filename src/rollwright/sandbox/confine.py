"""What the kernel takes away from a sandboxed process: Landlock, capabilities, rlimits; ctypes only.

Role: the walls. Neighbours: `seccomp` is one of them; `zygote` and `native.inside` put them up in each fresh
child, `local` asks `landlock_abi`.
Invariants: standard library only (the zygote runs without site-packages); a wall that was asked for and
cannot be built raises, it is never left out; what the walls really keep is not claimed here but tried by
`probe`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable

from rollwright.sandbox.seccomp import Filter, Profile

_libc = ctypes.CDLL(None, use_errno=True)

# Landlock (linux/landlock.h); the system call numbers are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract UNIX sockets, signals

# prctl (linux/prctl.h)
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 where it has none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def _prctl(option: int, *arguments: int | ctypes.Array[ctypes.c_char]) -> None:
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    values += [ctypes.c_ulong(0)] * (4 - len(values))
    if _libc.prctl(option, *values) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none can be lost."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, which forked this process, ends."""
    _prctl(_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(70)


def limit_resources(
    cpu_seconds: int, memory_bytes: int, file_bytes: int, processes: int | None, spare: int = 0
) -> None:
    """rlimits of one process and what it forks; `processes` counts all of the user's, so it is None for
    root (exempt). It may raise that limit by `spare`."""
    # a second between SIGXCPU, which names the cause, and SIGKILL, which doesn't
    _limit(resource.RLIMIT_CPU, cpu_seconds, 1)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_CORE, 0)
    if processes is not None:
        _limit(resource.RLIMIT_NPROC, processes, spare)


def _limit(kind: int, value: int, grace: int = 0) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and hard < value + grace:
        value, grace = min(value, hard), 0
    resource.setrlimit(kind, (value, value + grace))


class Walls:
    """Landlock and seccomp, prepared once (paths opened, filter assembled) and put up in each child by
    `close_in`."""

    def __init__(self, readable: Iterable[str], devices: Iterable[str]) -> None:
        self._abi = landlock_abi()
        bits = (1 << _FS_BITS[min(self._abi, 5)]) - 1
        self._own = bits & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
        self._attributes = struct.pack(
            "QQQ", bits, _TCP if self._abi >= 4 else 0, _SCOPES if self._abi >= 6 else 0
        )[: 8 if self._abi < 4 else 16 if self._abi < 6 else 24]
        read = _EXECUTE | _READ_FILE
        self._rules: list[tuple[int, int]] = []
        for path in readable:
            self._rules.append((os.open(path, os.O_PATH | os.O_CLOEXEC), self._for(path, read)))
        for path in devices:
            access = (_READ_FILE | _WRITE_FILE | _TRUNCATE) & bits
            self._rules.append((os.open(path, os.O_PATH | os.O_CLOEXEC), access))
        self._filter = Filter(Profile.SHARED)

    @staticmethod
    def _for(path: str, access: int) -> int:
        return access | _READ_DIR if os.path.isdir(path) else access

    def close_in(self, folder: str) -> None:
        """Leave this process only `folder` to write to, no network, no privileges and no way back; for good.

        Raises:
            OSError: a wall could not be put up; the caller must not go on.
        """
        no_new_privileges()
        ruleset = _ruleset(self._attributes)
        own = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        for descriptor, access in [*self._rules, (own, self._own)]:
            rule = struct.pack("=Qi", access, descriptor)
            if _libc.syscall(_ADD_RULE, ruleset, 1, rule, ctypes.c_uint(0)) != 0:
                raise OSError(ctypes.get_errno(), "landlock_add_rule")
        _restrict(ruleset)
        os.close(own)
        drop_capabilities()
        self._filter.install()


class Scope:
    """Landlock for a sandbox with files and processes of its own, but not the network namespace: no abstract
    UNIX socket outside is reached. `complete` says whether the kernel can keep that."""

    def __init__(self) -> None:
        self.complete = landlock_abi() >= 6
        self._attributes = struct.pack("QQQ", 0, 0, _SCOPES)

    def close(self) -> None:
        """Put it up around this process, which has no new privileges, for good."""
        if self.complete:
            _restrict(_ruleset(self._attributes))


def _ruleset(attributes: bytes) -> int:
    descriptor = _libc.syscall(
        _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    return int(descriptor)


def _restrict(ruleset: int) -> None:
    if _libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def no_new_privileges() -> None:
    """No program gives this process more than it has; for good."""
    _prctl(_SET_NO_NEW_PRIVS, 1)


_capset, _NOBODY, _NOTHING = _libc.capset, struct.pack("Ii", 0x20080522, 0), bytes(24)
SYS_CHROOT = struct.pack("6I", 1 << 18, 1 << 18, 0, 0, 0, 0)
"""CAP_SYS_CHROOT: effective, permitted; no program that is started has it."""


def drop_capabilities(but: bytes = _NOTHING) -> None:
    """Give up every capability but those."""
    if _capset(_NOBODY, but) != 0:
        raise OSError(ctypes.get_errno(), "capset")
