"""System calls that an agent has no business with.

Role: probes of the guarantee `kernel_surface`, one for each call. Neighbours: `base`. Invariant: every call
is made so that it changes nothing where it is allowed: what is set is what was, what is mounted goes with the
child that mounted it; where the kernel asks for the right before it looks at the arguments, they are wrong.
Numbers are those of x86-64 and AArch64.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

from rollwright.sandbox.base import SandboxProvider
from rollwright.testing.probes.base import PROBES, Observation, Probe, agent, attacked, probe, ran

_COLUMN = {"x86_64": 0, "aarch64": 1}
_NUMBERS = {
    "clone": (56, 220),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "clone3": (435, 435),
    "init_module": (175, 105),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "swapoff": (168, 225),
}

_CALLS = {
    "new_user_namespace": "inside(lambda: call(n.unshare, 0x10000000) == 0)",
    "new_namespaces": """
inside(lambda: any(call(n.unshare, kind) == 0 for kind in (0x20000, 0x40000000, 0x20000000)))
""",
    "clone_into_a_user_namespace": """
def child(number, *arguments):
    pid = call(number, *arguments)
    if pid == 0:
        os._exit(0)
    return pid > 0 and os.waitpid(pid, 0)[0] == pid
arguments = struct.pack('QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0)
inside(lambda: child(n.clone, 0x10000000 | 17, 0, 0, 0, 0) or child(n.clone3, arguments, len(arguments)))
""",
    "mounting": """
inside(lambda: call(n.mount, b'x', b'.', b'no-such-kind', 0, None) == 0 or errno() not in (1, 38))
""",
    "unmounting": "inside(lambda: call(n.umount2, b'.', 8) == 0 or errno() not in (1, 38))",
    "detached_mounts": """
def opened():
    made = [call(n.fsopen, b'tmpfs', 0), call(n.open_tree, -100, b'/', 1)]
    return any(number >= 0 for number in made)
inside(opened)
""",
    "joining_namespaces": """
def joins():
    for kind in ('net', 'mnt', 'user', 'ipc', 'uts'):
        for pid in (1, os.getppid()):
            descriptor = attempt(lambda: os.open(f'/proc/{pid}/ns/{kind}', os.O_RDONLY))
            if isinstance(descriptor, int) and call(n.setns, descriptor, 0) == 0:
                return 1
    return 0
inside(joins)
""",
    "setting_the_clock": """
def sets():
    if call(n.settimeofday, None, None) == 0:
        return 1  # allowed: no need to set anything
    now = time.time_ns()
    return call(n.clock_settime, 0, struct.pack('qq', now // 10**9, now % 10**9)) == 0
inside(sets)
""",
    "tuning_the_clock": """
def tunes():
    buffer = ctypes.create_string_buffer(256)
    if call(n.settimeofday, None, None) == 0:
        return 1
    struct.pack_into('I', buffer, 0, 0)
    if call(n.adjtimex, buffer) < 0:
        return 0
    struct.pack_into('I', buffer, 0, 2)  # ADJ_FREQUENCY, to what it is
    return call(n.adjtimex, buffer) >= 0
inside(tunes)
""",
    "kernel_keyrings": """
def keys():
    made = [call(n.keyctl, 0, -2, 1), call(n.add_key, b'user', b'bait', b'!', 1, -1)]
    return any(number > 0 for number in made)
inside(keys)
""",
    "io_uring": "inside(lambda: call(n.io_uring_setup, 1, ctypes.create_string_buffer(120)) >= 0)",
    "bpf": """
def maps():
    attributes = ctypes.create_string_buffer(struct.pack('IIII', 2, 4, 4, 1), 128)
    return call(n.bpf, 0, attributes, 128) >= 0
inside(maps)
""",
    "perf": """
def counts():
    attributes = ctypes.create_string_buffer(struct.pack('IIQ', 1, 112, 1), 112)
    struct.pack_into('Q', attributes, 40, 1 | 1 << 5 | 1 << 6)  # disabled, without kernel and hypervisor
    return call(n.perf_event_open, attributes, 0, -1, -1, 0) >= 0
inside(counts)
""",
    "userfaultfd": "inside(lambda: call(n.userfaultfd, 1) >= 0 or call(n.userfaultfd, 0) >= 0)",
    "files_by_handle": """
def opens():
    handle = ctypes.create_string_buffer(struct.pack('II', 128, 0), 136)
    mount = ctypes.c_int()
    call(n.name_to_handle_at, -100, b'.', handle, ctypes.byref(mount), 0)
    here = os.open('.', os.O_RDONLY)
    return call(n.open_by_handle_at, here, handle, 0) >= 0
inside(opens)
""",
    "terminal_input": """
import fcntl
def types():
    for name in (0, 1, 2, '/dev/tty', '/dev/console', '/dev/tty0', '/dev/pts/0'):
        try:
            where = name if isinstance(name, int) else os.open(name, os.O_RDWR | os.O_NOCTTY)
            fcntl.ioctl(where, 0x5412, b'\\0')
            return 1
        except OSError:
            pass
    return 0
inside(types)
""",
    "privileges": """
def gains():
    wanted = struct.pack('Ii', 0x20080522, 0), struct.pack('IIIIII', *[0xFFFFFFFF] * 3, *[0xFFFFFFFF] * 3)
    text = open('/proc/self/status').read() if os.path.exists('/proc/self/status') else ''
    has = [line for line in text.splitlines() if line.startswith(('CapEff', 'CapPrm', 'CapAmb'))]
    held = any(int(line.split()[1], 16) for line in has)
    return held or _libc.capset(*wanted) == 0 or _libc.prctl(39, 0, 0, 0, 0) == 0
inside(gains)
""",
    "kernel_modules": "inside(lambda: call(n.init_module, None, 0, b'') == 0 or errno() not in (1, 38))",
    "restarting_the_machine": """
inside(lambda: call(n.reboot, 0, 0, 0, None) == 0 or errno() not in (1, 38))
""",
    "name_of_the_machine": """
name = os.uname().nodename.encode()
inside(lambda: call(n.sethostname, name, len(name)) == 0)
""",
    "log_of_the_kernel": "inside(lambda: call(n.syslog, 3, ctypes.create_string_buffer(64), 64) >= 0)",
    "swap": "inside(lambda: call(n.swapoff, b'/nowhere') == 0 or errno() not in (1, 38))",
    "sockets_of_the_crypto_layer": """
def makes(*arguments):
    socket.socket(*arguments).close()
    return 1
inside(lambda: attempt(lambda: makes(38, socket.SOCK_SEQPACKET)) == 1)
""",
    "calls_by_other_numbers": """
import mmap, platform
def other():
    if platform.machine() != 'x86_64':
        return 0
    if call(0x40000000 | 272, 0x10000000) == 0:  # x32
        return 1
    # push rbx; mov eax, 310 (unshare of i386); mov ebx, CLONE_NEWUSER; int 0x80; pop rbx; ret
    code = bytes.fromhex('53 b836010000 bb00000010 cd80 5b c3')
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    return run() == 0
inside(other)
""",
    "watching_all_files": "inside(lambda: call(n.fanotify_init, 4, 0) >= 0)",
}


def _words() -> str:
    """Source that names the machine's call numbers `n.…`."""
    column = _COLUMN[platform.machine()]
    numbers = ", ".join(f"{name}={pair[column]}" for name, pair in _NUMBERS.items())
    return f"import types\nn = types.SimpleNamespace({numbers})\nerrno = ctypes.get_errno\n"


def _make(name: str, body: str) -> Probe:
    """A probe that is stopped where `body` ends in 0."""

    async def attempt(provider: SandboxProvider) -> Observation:
        async with attacked(provider) as sandbox:
            told = await ran(sandbox, agent(f"{_words()}{body}"))
        return Observation("kernel_surface", told == "0", "refused" if told == "0" else f"allowed ({told})")

    attempt.__name__ = attempt.__qualname__ = name
    return attempt


if platform.machine() in _COLUMN:
    PROBES.extend(_make(name, body) for name, body in _CALLS.items())


_COPY = """
import shutil, subprocess
shutil.copyfile(shutil.which('id', path='/usr/bin:/bin'), 'id')
found = []
for uid in (12345, 65534, 0):
    attempt(lambda: os.chown('id', uid, uid))
    attempt(lambda: os.chmod('id', 0o6755))
    run = lambda: subprocess.run([os.path.abspath('id'), '-u'], capture_output=True, text=True).stdout
    shown = attempt(run)
    found.append(shown.strip() not in (str(os.getuid()), 'PermissionError', ''))
[any(found), os.getcwd()]
"""


@probe
async def a_setuid_program(provider: SandboxProvider) -> Observation:
    """A copy with the setuid bit: it gives no other user inside, and does not stay for others outside."""
    async with attacked(provider) as sandbox:
        gained, _, place = (await ran(sandbox, agent(_COPY))).strip("[]").partition(", ")
        left = Path(place.strip("'")) / "id"
        outside = left.exists() and bool(left.stat().st_mode & 0o6000) and left.stat().st_uid == 0
    return Observation("kernel_surface", gained == "False" and not outside, f"{gained}, outside: {outside}")


_SHARED = """
_libc.shmat.restype = ctypes.c_void_p
def writes():
    address = _libc.shmat(number, None, 0)
    if address not in (None, ctypes.c_void_p(-1).value):
        ctypes.memmove(address, b'!', 1)
    return 0
inside(writes)
"""


@contextlib.contextmanager
def _segment() -> Iterator[tuple[int, int]]:
    """(number, address) of shared memory of the host's."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0, ctypes.c_size_t(4096), 0o1600)
    if number < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    try:
        address = libc.shmat(number, None, 0)
        yield number, address
        libc.shmdt(ctypes.c_void_p(address))
    finally:
        libc.shmctl(number, 0, None)


@probe
async def shared_memory_of_the_host(provider: SandboxProvider) -> Observation:
    """A System V segment, which has neither a path nor a socket."""
    async with attacked(provider) as sandbox:
        with _segment() as (number, address):
            await ran(sandbox, agent(_SHARED, number=number))
            written = ctypes.string_at(address, 1)
    return Observation("kernel_surface", written == b"\0", f"first byte: {written!r}")
