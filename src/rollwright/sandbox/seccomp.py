"""The system calls that a sandboxed process may not make.

Role: assembles the filter once, installs it in each child. Neighbours: `confine` and `native.inside`.
Invariants: standard library only; every refusal is an errno, never a signal; what is refused holds for all
that the process starts, for good.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_SECCOMP = 1, 22


class Profile(enum.Enum):
    """What the process has for itself."""

    SHARED = "shared"
    """The host's files, processes and network stand behind Landlock only."""
    OWN = "own"
    """Files, processes and network are the sandbox's own. It holds for the zygote and for pid 1 too, so it
    lets through what they need; processes without capabilities get no further with that."""
    CUTTING = "cutting"
    """As `OWN`, for a pid 1 that makes roots for interpreters."""


_Numbers = tuple[int, int]
"""Of one call, on x86-64 and AArch64."""
_NONE = 0xFFFFFFFF  # no such call on that machine

# What an agent has no business with, wherever it is.
_DENIED: dict[str, _Numbers] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "pivot_root": (155, 41),
    "fsopen": (430, 430),
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
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "setdomainname": (171, 162),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "iopl": (172, _NONE),
    "ioperm": (173, _NONE),
}
_CUTS = ("pivot_root", "unshare", "setns")
"""What `CUTTING` has nevertheless."""
# Where files, processes and sockets are the host's.
_SHARED: dict[str, _Numbers] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "chroot": (161, 51),
    "sethostname": (170, 161),
    "socket": (41, 198),
    # a process group that nothing can leave: one killpg ends all of it, fork bombs included
    "setsid": (112, 157),
    "setpgid": (109, 154),
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
# Modes, owners and times reach outside too, but honest programs set them and stop at an error: they are told
# that it worked, and nothing is changed.
_IGNORED: dict[str, _Numbers] = {
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
# Allowed for the caller itself, whom 0 names: another process of the same user may be one of ours.
_OWN_ONLY: dict[str, _Numbers] = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
_PRIORITY: dict[str, _Numbers] = {"setpriority": (141, 140), "ioprio_set": (251, 30)}
"""These name it in the second argument."""
_PRCTL, _CLONE, _CLONE3 = (157, 167), (56, 220), (435, 435)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_CLONE_NEW = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK: what a network namespace keeps apart
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _EQUAL, _GREATER, _MASKED, _AND, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_LOW = 16  # offset of the low half of args[0] on little-endian machines; args are 8 bytes apart


def _jump(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, k)


_ALLOW, _IGNORE = _jump(_GIVE, 0x7FFF0000), _jump(_GIVE, 0x00050000)
_REFUSE = _jump(_GIVE, 0x00050000 | errno.EPERM)
_ABSENT = _jump(_GIVE, 0x00050000 | errno.ENOSYS)


def _when(number: int, *then: bytes) -> list[bytes]:
    """`then`, which decides, for that call."""
    return [_jump(_EQUAL, number, 0, len(then)), *then]


def _argument(number: int, allowed: tuple[int, ...]) -> list[bytes]:
    """Allow where that argument is one of these, else refuse."""
    tests = [_jump(_EQUAL, value, len(allowed) - i) for i, value in enumerate(allowed)]
    return [_jump(_LOAD, _LOW + 8 * number), *tests, _REFUSE, _ALLOW]


def program(profile: Profile, machine: str) -> bytes:
    """Classic BPF over `struct seccomp_data` {nr, arch, ip, args[6]} for that machine (seccomp(2))."""
    column, shared = list(_AUDIT_ARCH).index(machine), profile is Profile.SHARED
    code = [_jump(_LOAD, 4), _jump(_EQUAL, _AUDIT_ARCH[machine], 1), _REFUSE, _jump(_LOAD, 0)]
    code += [_jump(_GREATER, 0x40000000, 0, 1), _REFUSE]  # x32 numbers
    for name, numbers in (_DENIED | _SHARED if shared else _DENIED).items():
        if not (profile is Profile.CUTTING and name in _CUTS):
            code += _when(numbers[column], _REFUSE)
    for numbers in _IGNORED.values() if shared else ():
        code += _when(numbers[column], _IGNORE)
    for numbers in _OWN_ONLY.values():
        code += _when(numbers[column], *_argument(0, (0,)))
    for numbers in _PRIORITY.values():
        code += _when(numbers[column], *_argument(1, (0,)))
    # a process that unsets its death signal would outlive the host
    death = (_jump(_LOAD, _LOW), _jump(_EQUAL, _SET_PDEATHSIG, 0, 1), _REFUSE, _ALLOW)
    code += _when(_PRCTL[column], *death)
    if shared:
        # clone3 takes its flags by pointer, which no filter can read: without it, libc falls back to clone
        code += _when(_CLONE3[column], _ABSENT)
        spaces = (_jump(_LOAD, _LOW), _jump(_MASKED, _CLONE_NEW, 0, 1), _REFUSE, _ALLOW)
        code += _when(_CLONE[column], *spaces)
        # a datagram pair could be pointed at another socket's path; a stream pair cannot
        kind = (_jump(_LOAD, _LOW + 8), _jump(_AND, 0xF), _jump(_EQUAL, 1, 0, 1), _ALLOW, _REFUSE)
        code += _when(_SOCKETPAIR[column], *kind)
    else:
        code += _when(_SOCKET[column], *_argument(0, _FAMILIES))
    return b"".join([*code, _ALLOW])


def here(profile: Profile) -> bytes:
    """The program for this machine; empty where its numbers are not known."""
    machine = os.uname().machine
    return program(profile, machine) if machine in _AUDIT_ARCH else b""


class Filter:
    """The filter of a profile, assembled once. On a machine whose numbers are not known it does nothing,
    which the probe finds out."""

    def __init__(self, profile: Profile) -> None:
        self._header: ctypes.Array[ctypes.c_char] | None = None
        if code := here(profile):
            self._code = ctypes.create_string_buffer(code, len(code))
            self._header = ctypes.create_string_buffer(
                struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(self._code))
            )

    def install(self) -> None:
        """Put it on this process, which has no new privileges, for good."""
        if self._header is None:
            return
        rest = (ctypes.c_ulong(0), ctypes.c_ulong(0))
        if _libc.prctl(_SET_SECCOMP, ctypes.c_ulong(2), self._header, *rest) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
