"""What a backend really keeps, found out by trying to escape from it.

Role: turns attempts into `Guarantees`. Neighbours: `local` runs it at start, the conformance suite compares
with it. Invariants: the agent's word is not taken where the host can look itself (files, sockets, processes);
nothing is enforced that was not tried; a backend without walls is never better than best effort.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollwright.sandbox import owners
from rollwright.sandbox.base import Guarantee, Guarantees, Limits, SandboxProvider
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
import os, signal, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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


async def probe(provider: SandboxProvider, root: Path, limits: Limits, *, confined: bool) -> Guarantees:
    """Try each escape from a sandbox of `provider`. `confined` says that walls were meant to stand."""
    kept = Guarantee.ENFORCED if confined else Guarantee.BEST_EFFORT
    absent, best = Guarantee.ABSENT, Guarantee.BEST_EFFORT
    sandbox = await provider.create(Environment(), owner="probe", limits=limits)
    try:
        with bait(root / f"bait-{sandbox.id}") as outside:
            result = await sandbox.run_code(outside.script(), timeout=_SECONDS)
            changed, reached = outside.touched() or result.value != "'PermissionError'", outside.reached()
        tried = result.status is CallStatus.OK
        forked = await sandbox.run_code(PROCESSES.format(limit=limits.processes + 8), timeout=_SECONDS)
        large = await sandbox.run_code(LARGE_FILE.format(size=limits.file_bytes), timeout=_SECONDS)
        memory = await sandbox.run_code(f"len(bytearray({limits.memory_bytes}))", timeout=_SECONDS)
        privileged = await sandbox.run_code(PRIVILEGED, timeout=_SECONDS)
        daemon = await sandbox.run_code(DAEMON, timeout=_SECONDS)
        pid = int(await sandbox.files.read("daemon")) if daemon.status is CallStatus.OK else 0
    finally:
        await sandbox.kill()
    gone = pid > 0 and not owners.alive(pid)
    return Guarantees(
        fs=kept if tried and not changed else absent,
        net=absent if not tried or "tcp" in reached else kept if not reached else best,
        pids=best if forked.value and int(forked.value) <= limits.processes else absent,
        memory=best if memory.status is CallStatus.MEMORY else absent,  # of each process, not of all together
        disk=best if _refused(large) else absent,  # of each file, not of all together
        kill=kept if gone else absent,
        kernel_surface=best if privileged.value == "0" else absent,
    )


def _refused(result: ExecResult) -> bool:
    return result.status is CallStatus.ERROR and "File too large" in result.stderr
