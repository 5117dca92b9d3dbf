"""What the host lays out for agent code to reach: a folder, sockets, a process; and whether it was reached.

Role: the host's own eyes. Neighbours: the probes of this package. Invariant: what it says was observed on
the host, nothing of it is the agent's word.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Address = tuple[str, int] | str
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): asking the way to it sends nothing."""


@dataclass(frozen=True)
class Folder:
    """Files outside a sandbox."""

    path: Path
    secret: str
    before: list[tuple[str, int, int, int, int]]

    @property
    def file(self) -> Path:
        """The file with the secret."""
        return self.path / "secret"

    def changed(self) -> bool:
        """Whether anything in it is not as it was laid out."""
        return _seen(self.path) != self.before or self.file.read_text() != self.secret


def _seen(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """(name, mode, owner, links, time of change in ns) of what is in it; the folder itself is "."."""
    return sorted(
        (name, found.st_mode, found.st_uid, found.st_nlink, found.st_mtime_ns)
        for name, found in ((name, (folder / name).lstat()) for name in [".", *os.listdir(folder)])
    )


@contextlib.contextmanager
def folder() -> Iterator[Folder]:
    """A secret and a file to delete, in a folder of the machine's temporary one; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="bait-") as path:
        secret = secrets.token_hex(16)
        for name in ("secret", "doomed"):
            (Path(path) / name).write_text(secret)
        yield Folder(Path(path), secret, _seen(Path(path)))


@dataclass
class Sockets:
    """Sockets outside a sandbox: `tcp`, `outward` (TCP at an address that other machines see), `tcp6`, `udp`,
    `abstract`, `abstract-datagram`, `path`; those that this machine can make."""

    ends: dict[str, socket.socket] = field(default_factory=dict)

    def port(self, name: str) -> int:
        """Port of an internet socket; 0 where there is none."""
        return int(self.ends[name].getsockname()[1]) if name in self.ends else 0

    def host(self, name: str) -> str:
        """Its address."""
        return str(self.ends[name].getsockname()[0]) if name in self.ends else ""

    def name(self, name: str) -> str:
        """Path of a UNIX socket, or its abstract name with a NUL before it."""
        found = self.ends[name].getsockname()
        return found.decode() if isinstance(found, bytes) else str(found)

    def reached(self) -> list[str]:
        """Those to which something came through since the last call."""
        found = []
        for name, end in self.ends.items():
            with contextlib.suppress(BlockingIOError):
                if end.type == socket.SOCK_DGRAM:
                    end.recv(1)
                else:
                    end.accept()[0].close()
                found.append(name)
        return found


def outward() -> str:
    """The address that this machine would send from; "" where it has no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end, contextlib.suppress(OSError):
        end.connect(_ELSEWHERE)
        return str(end.getsockname()[0])
    return ""


@contextlib.contextmanager
def sockets() -> Iterator[Sockets]:
    """Open all that can be, closed at the end."""
    token = f"rollwright-bait-{secrets.token_hex(8)}"
    place = tempfile.mkdtemp(prefix="bait-")
    inet, inet6, unix = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    wanted: dict[str, tuple[int, int, Address]] = {
        "tcp": (inet, stream, ("127.0.0.1", 0)),
        "outward": (inet, stream, (outward(), 0)),
        "tcp6": (inet6, stream, ("::1", 0)),
        "udp": (inet, datagram, ("127.0.0.1", 0)),
        "abstract": (unix, stream, f"\0{token}"),
        "abstract-datagram": (unix, datagram, f"\0{token}-datagram"),
        "path": (unix, stream, f"{place}/socket"),
    }
    made = Sockets()
    try:
        for name, (family, kind, address) in wanted.items():
            if isinstance(address, tuple) and not address[0]:
                continue
            with contextlib.suppress(OSError):  # a machine without IPv6
                end = socket.socket(family, kind)
                made.ends[name] = end
                try:
                    end.bind(address)
                    end.setblocking(False)
                    if kind == stream:
                        end.listen()
                except OSError:
                    made.ends.pop(name).close()
                    raise
        yield made
    finally:
        for end in made.ends.values():
            end.close()
        shutil.rmtree(place)


@dataclass(frozen=True)
class Sleeper:
    """A process outside a sandbox that has all signals blocked: what is sent to it stays to be seen."""

    pid: int
    environment: bytes
    limits: tuple[int, int]

    def attacked(self) -> list[str]:
        """What was done to it."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return ["ended"]
        status = {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}
        found = []
        if status["State"][0] != "S":
            found.append(f"is in state {status['State']}")
        if int(status["SigPnd"], 16) | int(status["ShdPnd"], 16):
            found.append("signalled")
        if status["TracerPid"] != "0":
            found.append("traced")
        if resource.prlimit(self.pid, resource.RLIMIT_CORE) != self.limits:
            found.append("limited")
        if os.getpriority(os.PRIO_PROCESS, self.pid) != os.getpriority(os.PRIO_PROCESS, 0):
            found.append("its priority was changed")
        return found


@contextlib.contextmanager
def sleeper() -> Iterator[Sleeper]:
    """Start it; it is ended at the end."""
    token = f"TOKEN={secrets.token_hex(16)}"
    name, _, value = token.partition("=")
    pid = os.posix_spawnp("sleep", ["sleep", "600"], {name: value}, setsigmask=signal.valid_signals())
    try:
        while Path(f"/proc/{pid}/comm").read_text() != "sleep\n" or _state(pid) != "S":
            os.sched_yield()
        yield Sleeper(pid, f"{token}\0".encode(), resource.prlimit(pid, resource.RLIMIT_CORE))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def marked(mark: str) -> list[int]:
    """Processes of this machine, not zombies, with `mark` as their name or as one of their arguments."""
    found = []
    for name in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int, reverse=True):  # newest first
        with contextlib.suppress(OSError):
            place = Path("/proc") / name
            words = (place / "cmdline").read_bytes().split(b"\0")
            named = mark.encode() in words or (place / "comm").read_text().strip() == mark
            if named and _state(int(name)) not in "ZX":
                found.append(int(name))
    return found
