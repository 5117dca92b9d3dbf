"""What a vendor's SDK has to offer to become a sandbox backend.

Role: two protocols, `Vendor` and `Machine`, and the failures they speak in. Neighbours: `provider` and
`instance` build the whole sandbox protocol on them, `e2b` and `kubernetes` implement them. Invariant: nothing
of an SDK, neither its types nor its exceptions, gets past these two.

A further vendor (Daytona, Modal, …) is one file beside `e2b` with:

1. a class that is a `Vendor`: `open` (import the SDK inside it, `MissingExtra` without it; read the key
   from the environment and never log it), `create`, `kill`, `owned`, `close`, and what it says of itself
   (`name`, `isolation`, `denies_network`, `networks`, `targets`);
2. a class that is a `Machine`: `run` a command line (no shell is assumed; the line is words without
   quotes), `read` and `write` a file by its path relative to the folder where commands start, `kill`,
   `set_timeout`. It may be `Pausable` and `Forkable`, where the vendor stops and copies machines itself;
3. one function that turns the SDK's exceptions into the failures below, around every call of the SDK, and
   the SDK's own retries switched off: `provider` repeats what is worth repeating, with the clock it was
   handed;
4. a configuration in `config.py`, an entry point in `rollwright.sandboxes`, an extra in `pyproject.toml`,
   and a server that speaks its wire for `tests/contract/test_remote_sandboxes.py`.

Failures: `SandboxLost` (that machine is gone), `SandboxUnavailable` (key, right, template or pool is
wrong: the text says what to do), `Busy` (too many requests, or no capacity now), `Unreachable` (no
answer, or the connection broke: it may or may not have happened), `SandboxError` (anything else).
`create` and `kill` must be safe to repeat after `Unreachable`; a machine made by a lost answer is one
that the reaper and the vendor's own timeout end.

The image needs `python3` (3.11 or newer) with `sqlite3`, on Linux with /proc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rollwright.errors import SandboxError


class Busy(SandboxError):
    """The vendor wants fewer requests, or has no room now: the same may work a little later."""


class Unreachable(SandboxError):
    """No answer came, or only a part."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    stdout: str
    stderr: str
    exit_code: int


@dataclass(frozen=True)
class Owned:
    """A machine at the vendor's, and the labels it was made with."""

    id: str
    labels: Mapping[str, str]


class Machine(Protocol):
    """One machine of a vendor's. Every method takes at most `timeout` seconds, then raises `Unreachable`."""

    id: str

    async def run(self, line: str, *, timeout: float) -> Ran:
        """Run a command to its end; the vendor's file gives up on output over a few MiB (`SandboxError`)."""

    async def read(self, path: str, limit: int, *, timeout: float) -> bytes:
        """A file's contents; `SandboxError` where there is none or it has more than `limit` bytes."""

    async def write(self, path: str, data: bytes, *, timeout: float) -> None:
        """Replace a file's contents; its folder is there."""

    async def set_timeout(self, seconds: float, *, timeout: float) -> None:
        """Let the vendor end it so many seconds from now: what holds when the host is dead."""

    async def kill(self, *, timeout: float) -> None:
        """End it and all that is in it; one that is gone already is no error."""

    async def alive(self, *, timeout: float) -> bool:
        """Whether the vendor still has it."""


@runtime_checkable
class Pausable(Protocol):
    """A machine that the vendor itself stops, which then costs less."""

    async def pause(self, *, timeout: float) -> None:
        """Stop it with its memory."""

    async def resume(self, *, timeout: float) -> None:
        """Let it go on."""


@runtime_checkable
class Forkable(Protocol):
    """A machine that the vendor copies with its memory."""

    async def fork(self, count: int, seconds: float, *, timeout: float) -> Sequence[Machine]:
        """`count` running copies with the same labels, which the vendor ends after `seconds`; all or none."""


class Vendor(Protocol):
    """A vendor's API."""

    name: str
    """The backend's name, in `info()`."""
    isolation: str
    """What the vendor says keeps its machines apart; not probed, it cannot be from inside."""
    denies_network: bool
    """Whether `create` with network "none" sets a rule of the vendor's that denies it."""
    networks: Sequence[str]
    """Names besides "none" that `create` grants."""

    @property
    def targets(self) -> Sequence[tuple[str, int]]:
        """Hosts and ports that answer the host machine (the vendor's own API), for a sandbox to fail to
        reach."""

    async def open(self) -> None:
        """Make ready and check key and rights; one cheap request."""

    async def create(
        self, labels: Mapping[str, str], network: str, seconds: float, key: str, *, timeout: float
    ) -> Machine:
        """A running machine that the vendor itself ends after `seconds`. A repeated request has the same
        `key` (lower case hex)."""

    async def kill(self, id: str, *, timeout: float) -> None:
        """End the machine of that id; one that is gone already is no error."""

    async def owned(self, labels: Mapping[str, str], *, timeout: float) -> Sequence[Owned]:
        """All machines that have all of `labels`, paused ones too."""

    async def close(self) -> None:
        """Let go of connections; machines stay."""
