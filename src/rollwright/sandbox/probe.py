"""What a backend really keeps, found out by trying to escape from it.

Role: turns attempts into `Guarantees`. Neighbours: `local` runs it at start, the conformance suite compares
with it. Invariants: the agent's word is not taken where the host can look itself (files, sockets, processes);
nothing is enforced that was not tried; a backend without walls is never better than best effort.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollwright.sandbox import processes
from rollwright.sandbox.base import Guarantee, GuaranteeName, Guarantees, Limits, SandboxProvider
from rollwright.types import CallStatus, Environment, ExecResult

_SECONDS = 20.0

ESCAPES = """
import os, socket
def attempt(action):
    try:
        return action() or 'done'
    except BaseException as error:
        return type(error).__name__
def write(path):
    with open(path, 'ab') as file:
        file.write(b'!')
def send(family, kind, address):
    with socket.socket(family, kind) as end:
        end.settimeout(1)
        end.connect(address)
        end.send(b'!')
seen = attempt(lambda: open({secret!r}).read())
attempt(lambda: write({secret!r}))
attempt(lambda: os.truncate({secret!r}, 0))
attempt(lambda: os.unlink({doomed!r}))
attempt(lambda: os.mkdir({made!r}))
attempt(lambda: send(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', {tcp})))
attempt(lambda: send(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', {udp})))
attempt(lambda: send(socket.AF_UNIX, socket.SOCK_STREAM, chr(0) + {abstract!r}))
seen
"""
DAEMON = """
import ctypes, os, signal, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(15, {mark!r}.encode(), 0, 0, 0)  # its name, which the host sees
        with open('daemon.new', 'w') as file:
            file.write(str(os.getpid()))
        os.rename('daemon.new', 'daemon')
        time.sleep(600)
    os._exit(0)
while not os.path.exists('daemon'):
    time.sleep(0.001)
"""
PROCESSES = """
import os, signal, time
made = []
try:
    while len(made) < {limit}:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        made.append(pid)
except OSError:
    pass
for pid in made:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
len(made)
"""
LARGE_FILE = """
with open('large', 'wb') as file:
    file.seek({size})
    file.write(b'!')
"""
DISK = """
import os
def fill(parts):
    try:
        for number, size in parts:
            with open('part%d' % number, 'wb') as file:
                file.write(bytes(size))
        return True
    except OSError:
        return False
    finally:
        for name in os.listdir():
            if name.startswith('part'):
                os.unlink(name)
large = [(number, 2**20) for number in range({size} // 2**20 + 8)]
fill(large) or fill([(number, 0) for number in range({files} + 100)])
"""
MEMORY = """
import os
ends = []
for _ in range({count}):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            held = bytearray({each})
            os.write(write, b'!')
            os.read(0, 1) or __import__('time').sleep(600)
        finally:
            os._exit(0)
    os.close(write)
    ends.append(read)
told = [os.read(read, 1) for read in ends]
all(told)
"""
PRIVILEGED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
pid = os.fork()
if pid == 0:
    answers = [libc.unshare(0x10000000), libc.ptrace(0, 0, 0, 0), libc.syscall(425, 1, bytes(120))]
    os._exit(sum(answer >= 0 for answer in answers))
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@dataclass
class Bait:
    """Something outside a sandbox for agent code to reach, and whether it did."""

    folder: Path
    sockets: dict[str, socket.socket]

    def script(self) -> str:
        """Python that tries to reach all of it."""
        return ESCAPES.format(
            secret=str(self.folder / "secret"),
            doomed=str(self.folder / "doomed"),
            made=str(self.folder / "made"),
            tcp=self.sockets["tcp"].getsockname()[1],
            udp=self.sockets["udp"].getsockname()[1],
            abstract=self.sockets["abstract"].getsockname()[1:].decode(),
        )

    def touched(self) -> bool:
        """Whether files outside were changed."""
        names = sorted(path.name for path in self.folder.iterdir())
        return names != ["doomed", "secret"] or (self.folder / "secret").read_text() != "secret"

    def reached(self) -> list[str]:
        """Sockets outside to which something came through."""
        found = []
        for name, end in self.sockets.items():
            with contextlib.suppress(BlockingIOError):
                if name == "udp":
                    end.recv(1)
                else:
                    end.accept()[0].close()
                found.append(name)
        return found


@contextlib.contextmanager
def bait(folder: Path) -> Iterator[Bait]:
    """Lay it out in `folder` (made, and removed at the end)."""
    folder.mkdir()
    for name in ("secret", "doomed"):
        (folder / name).write_text(name)
    with contextlib.ExitStack() as stack:
        kinds: dict[str, tuple[int, int, tuple[str, int] | str]] = {
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{folder.name}-bait"),
        }
        sockets = {}
        for name, (family, kind, address) in kinds.items():
            sockets[name] = stack.enter_context(socket.socket(family, kind))
            sockets[name].bind(address)
            sockets[name].setblocking(False)
            if name != "udp":
                sockets[name].listen()
        try:
            yield Bait(folder, sockets)
        finally:
            for path in folder.iterdir():
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()


def marked(mark: str) -> list[int]:
    """Processes of this machine that are named `mark`, wherever they run."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{name}/comm").read_text().strip() == mark and processes.alive(int(name)):
                found.append(int(name))
    return found


async def probe(
    provider: SandboxProvider,
    root: Path,
    limits: Limits,
    *,
    confined: bool,
    together: Collection[GuaranteeName] = (),
) -> Guarantees:
    """Try each escape from a sandbox of `provider`. `confined` says that walls were meant to stand,
    `together` what is meant to be limited for all processes and files of a sandbox together."""
    kept = Guarantee.ENFORCED if confined else Guarantee.BEST_EFFORT
    absent, best = Guarantee.ABSENT, Guarantee.BEST_EFFORT
    small = msgspec.structs.replace(
        limits,
        memory_bytes=min(limits.memory_bytes, 128 * 2**20),
        file_bytes=min(limits.file_bytes, 8 * 2**20),
        disk_bytes=min(limits.disk_bytes, 16 * 2**20),
        files=min(limits.files, 500),
        wall_seconds=None,
    )
    sandbox = await provider.create(Environment(), owner="probe", limits=small)
    mark = f"rw-{sandbox.id[:12]}"

    async def value(code: str) -> str | None:
        return (await sandbox.run_code(code, timeout=_SECONDS)).value

    try:
        with bait(root / f"bait-{sandbox.id}") as outside:
            result = await sandbox.run_code(outside.script(), timeout=_SECONDS)
            changed, reached = outside.touched() or result.value == "'secret'", outside.reached()
        tried = result.status is CallStatus.OK
        forked = await value(PROCESSES.format(limit=limits.processes + 8))
        large = await sandbox.run_code(LARGE_FILE.format(size=small.file_bytes), timeout=_SECONDS)
        memory = await sandbox.run_code(f"len(bytearray({small.memory_bytes}))", timeout=_SECONDS)
        privileged = await value(PRIVILEGED)
        filling = DISK.format(size=small.disk_bytes, files=small.files)
        filled = "disk" not in together or await value(filling) != "False"
        each, most = small.memory_bytes * 3 // 5, (small.memory_bytes + small.disk_bytes) * 2
        spread = "memory" in together and await value(MEMORY.format(each=each, count=-(-most // each)))
        daemon = await sandbox.run_code(DAEMON.format(mark=mark), timeout=_SECONDS)
        seen = daemon.status is CallStatus.OK and bool(marked(mark))
    finally:
        await sandbox.kill()
    bounded = forked is not None and int(forked) <= limits.processes
    return Guarantees(
        fs=kept if tried and not changed else absent,
        net=absent if not tried or "tcp" in reached else kept if not reached else best,
        pids=absent if not bounded else Guarantee.ENFORCED if "pids" in together else best,
        memory=Guarantee.ENFORCED
        if "memory" in together and spread != "True"
        else best
        if memory.status is CallStatus.MEMORY
        else absent,
        disk=absent
        if not _refused(large)
        else Guarantee.ENFORCED
        if "disk" in together and not filled
        else best,
        kill=kept if seen and not marked(mark) else absent,
        kernel_surface=best if privileged == "0" else absent,
    )


def _refused(result: ExecResult) -> bool:
    return result.status is CallStatus.ERROR and "File too large" in result.stderr
