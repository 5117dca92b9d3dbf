"""What the kernel takes away from a sandboxed process: Landlock, seccomp, capabilities, rlimits; ctypes only.

Role: the walls. Neighbours: `zygote` calls it in each fresh child, `local` asks `landlock_abi`.
Invariants: standard library only (the zygote runs without site-packages); a wall that was asked for and
cannot be built raises, it is never left out; what the walls really keep is not claimed here but tried by
`probe`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)

# Landlock (linux/landlock.h); the system call numbers are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract UNIX sockets, signals

# prctl (linux/prctl.h)
_SET_PDEATHSIG, _SET_SECCOMP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 22, 36, 38

# x86-64 and AArch64 numbers of what an agent has no business with.
_DENIED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # a process group that nothing can leave: one killpg ends all of it, fork bombs included
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # io_uring performs system calls that no filter sees
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    # Landlock has no say over these: they reach names and attributes outside
    "inotify_add_watch": (254, 27),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
_NONE = 0xFFFFFFFF  # no such call on that machine
# Modes, owners and times reach outside too, but honest programs set them and stop at an error: they are told
# that it worked, and nothing is changed.
_IGNORED = {
    "chmod": (90, _NONE),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, _NONE),
    "fchown": (93, 55),
    "lchown": (94, _NONE),
    "fchownat": (260, 54),
    "utime": (132, _NONE),
    "utimes": (235, _NONE),
    "futimesat": (261, _NONE),
    "utimensat": (280, 88),
}
_PRLIMIT, _PRCTL = (302, 261), (157, 167)
_CLONE, _CLONE3, _SOCKETPAIR = (56, 220), (435, 435), (53, 199)
_CLONE_NEW = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


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


def limit_resources(cpu_seconds: int, memory_bytes: int, file_bytes: int, processes: int | None) -> None:
    """rlimits of one process and what it forks; `processes` counts all of the user's, so it is None for
    root (exempt)."""
    wanted = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # a second between SIGXCPU, which names the cause, and SIGKILL, which doesn't
        resource.setrlimit(kind, (value, value + (kind == resource.RLIMIT_CPU and hard != value)))


def _jump(code: int, k: int, true: int, false: int) -> bytes:
    return struct.pack("HBBI", code, true, false, k)


def _seccomp_program() -> bytes:
    """Classic BPF over `struct seccomp_data` {nr, arch, ip, args[6]}; every refusal is an errno, never a
    signal."""
    load, equal, greater, masked, give = 0x20, 0x15, 0x35, 0x45, 0x06
    machine = platform.machine()
    column = list(_AUDIT_ARCH).index(machine)
    allow, refuse = _jump(give, 0x7FFF0000, 0, 0), _jump(give, 0x00050000 | errno.EPERM, 0, 0)
    absent = _jump(give, 0x00050000 | errno.ENOSYS, 0, 0)
    low = 16  # offset of the low half of args[0] on little-endian machines; args are 8 bytes apart
    program = [_jump(load, 4, 0, 0), _jump(equal, _AUDIT_ARCH[machine], 1, 0), refuse, _jump(load, 0, 0, 0)]
    program += [_jump(greater, 0x40000000, 0, 1), refuse]  # x32 numbers
    for numbers in _DENIED.values():
        program += [_jump(equal, numbers[column], 0, 1), refuse]
    ignore = _jump(give, 0x00050000, 0, 0)
    for numbers in _IGNORED.values():
        program += [_jump(equal, numbers[column], 0, 1), ignore]
    # limits of its own only: those of another process could end it
    program += [_jump(equal, _PRLIMIT[column], 0, 4), _jump(load, low, 0, 0)]
    program += [_jump(equal, 0, 0, 1), allow, refuse]
    # a process that unsets its death signal would outlive the host
    program += [_jump(equal, _PRCTL[column], 0, 4), _jump(load, low, 0, 0)]
    program += [_jump(equal, _SET_PDEATHSIG, 0, 1), refuse, allow]
    # clone3 takes its flags by pointer, which no filter can read: without it, libc falls back to clone
    program += [_jump(equal, _CLONE3[column], 0, 1), absent]
    program += [_jump(equal, _CLONE[column], 0, 4), _jump(load, low, 0, 0)]
    program += [_jump(masked, _CLONE_NEW, 0, 1), refuse, allow]
    # a datagram pair could be pointed at another socket's path; a stream pair cannot
    program += [_jump(equal, _SOCKETPAIR[column], 0, 5), _jump(load, low + 8, 0, 0)]
    program += [_jump(0x54, 0xF, 0, 0), _jump(equal, 1, 0, 1), allow, refuse]
    return b"".join([*program, allow])


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
        self._filter: ctypes.Array[ctypes.c_char] | None = None
        if platform.machine() in _AUDIT_ARCH:
            self._code = ctypes.create_string_buffer(program := _seccomp_program(), len(program))
            self._filter = ctypes.create_string_buffer(
                struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(self._code))
            )

    @staticmethod
    def _for(path: str, access: int) -> int:
        return access | _READ_DIR if os.path.isdir(path) else access

    def close_in(self, folder: str) -> None:
        """Leave this process only `folder` to write to, no network, no privileges and no way back; for good.

        Raises:
            OSError: a wall could not be put up; the caller must not go on.
        """
        _prctl(_SET_NO_NEW_PRIVS, 1)
        ruleset = _libc.syscall(
            _CREATE_RULESET, self._attributes, ctypes.c_size_t(len(self._attributes)), ctypes.c_uint(0)
        )
        own = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        for descriptor, access in [*self._rules, (own, self._own)]:
            rule = struct.pack("=Qi", access, descriptor)
            if _libc.syscall(_ADD_RULE, ruleset, 1, rule, ctypes.c_uint(0)) != 0:
                raise OSError(ctypes.get_errno(), "landlock_add_rule")
        if _libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
        os.close(ruleset)
        os.close(own)
        header = struct.pack("Ii", 0x20080522, 0)
        if _libc.capset(header, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        if self._filter is not None:
            _prctl(_SET_SECCOMP, 2, self._filter)
