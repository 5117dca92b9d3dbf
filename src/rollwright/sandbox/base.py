"""The sandbox seam: an isolated place that runs an agent's actions and is gone afterwards.

Role: what every backend offers. Neighbours: tools act through it, the rollout factory owns its life,
rewards look into it. Invariants: it says which guarantees it really gives (`Guarantees`, from a probe that
tries the escape, not from a name); limits end in a typed `CallStatus`, never in an exception; after `kill`
nothing of it is left. A lost sandbox raises `SandboxLost`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from rollwright.types import Environment, ExecResult, Json


class Guarantee(enum.Enum):
    """How well one thing is kept."""

    ENFORCED = "enforced"
    BEST_EFFORT = "best_effort"
    ABSENT = "absent"


GuaranteeName = Literal["fs", "net", "pids", "memory", "disk", "kill", "kernel_surface"]


class Guarantees(Struct, frozen=True, kw_only=True):
    """What a backend keeps the agent from, as probed on this machine."""

    fs: Guarantee
    """From files outside."""
    net: Guarantee
    """From sockets outside."""
    pids: Guarantee
    """From more processes than `Limits.processes`, all of a sandbox together."""
    memory: Guarantee
    """From more memory than `Limits.memory_bytes`, all of a sandbox together."""
    disk: Guarantee
    """From more than `Limits.disk_bytes` and `Limits.files`, all of a sandbox together."""
    kill: Guarantee
    """From leaving a process behind."""
    kernel_surface: Guarantee = Guarantee.ABSENT
    """From system calls that an agent has no business with."""

    def missing(self, required: Sequence[str]) -> list[str]:
        """Those of `required` (field names) that are not enforced."""
        return [name for name in required if getattr(self, name) is not Guarantee.ENFORCED]


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of one sandbox."""

    cpu_seconds: int = 60
    """CPU seconds of each process."""
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 32 * 2**20
    """Size of one file."""
    disk_bytes: int = 256 * 2**20
    """Size of all files."""
    files: int = 20_000
    """Number of files and folders."""
    processes: int = 16
    wall_seconds: float | None = None
    """Life of the sandbox from its creation, or from the last `set_timeout`; None is without end."""
    output_bytes: int = 64 * 2**10
    """What one call may print; more ends it with `CallStatus.OUTPUT`."""


class State(enum.Enum):
    """Where a sandbox is in its life."""

    RUNNING = "running"
    PAUSED = "paused"
    KILLED = "killed"


class Info(Struct, frozen=True, kw_only=True):
    """What is known of one sandbox."""

    id: str
    backend: str
    """Name of the backend; one that is a weaker mode of another says so in its name."""
    owner: str
    """Whom it was made for: a rollout's id."""
    state: State
    guarantees: Guarantees
    limits: Limits
    network: str = "none"
    parent: str | None = None
    """The sandbox it was forked from."""
    forked: Literal["filesystem", "live"] | None = None
    """What a fork took along: files and database, or the interpreter's variables too."""


class Snapshot(Protocol):
    """Files and database of one moment; immutable. Any number of sandboxes may start from it, also when the
    one it was taken of is gone."""

    id: str

    async def save(self, folder: Path) -> Path:
        """Keep it on disk, named by its content: `folder`/sha256-….tar; gives that path. The same content
        gives the same file."""

    async def drop(self) -> None:
        """Free it; idempotent. Sandboxes that started from it go on."""


class Files(Protocol):
    """Files below a sandbox's working folder. No path leads outside: not by `..`, a link, or from the root.
    Every method raises `PermissionError` for such a path and where there is no regular file, `OSError` where
    a limit is reached, `SandboxLost` where the sandbox is gone."""

    async def read(self, path: str) -> bytes:
        """Contents of a file. Raises `FileNotFoundError` where there is none."""

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file's contents, making folders."""

    async def list(self, path: str = "") -> list[str]:
        """Paths of all regular files in that folder and below, sorted, relative to the working folder."""

    async def remove(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it."""

    async def upload(self, archive: bytes, path: str = "") -> None:
        """Unpack a tar archive into that folder: regular files and folders. Raises `PermissionError`, before
        anything is written, where it holds a link, a device, or a name that leads outside."""

    async def download(self, path: str = "") -> bytes:
        """That folder's regular files as a tar archive: the same bytes for the same files."""


class Sandbox(Protocol):
    """One environment. Calls on one sandbox run one after another. A call past its deadline is ended, and
    the interpreter's variables with it where it could not be interrupted (the result is `TIMEOUT`)."""

    id: str
    limits: Limits

    @property
    def files(self) -> Files:
        """Its files."""

    @property
    def guarantees(self) -> Guarantees:
        """What it keeps, as probed."""

    def info(self) -> Info:
        """What is known of it; costs nothing."""

    async def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        """Run a program, or a line of shell, in the working folder."""

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        """Run Python in the sandbox's persistent interpreter: variables stay from call to call; the value
        of a last expression is in `value` (its repr)."""

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        """Run one SQL statement on the sandbox's SQLite database; result sets are in `rows`."""

    async def snapshot(self) -> Snapshot:
        """Files and database now. Raises `SandboxError` where they cannot be kept."""

    async def restore(self, snapshot: Snapshot) -> None:
        """Take files and database back to `snapshot`, which may be another sandbox's of the same provider;
        programs and variables are gone."""

    async def fork(self, count: int = 1, *, live: bool = False) -> list[Sandbox]:
        """`count` more sandboxes with the same files and database; with `live` also with the interpreter's
        variables. Raises `SandboxError` where the backend's mode has no live fork, and says which has."""

    async def pause(self) -> None:
        """Stop its processes where they are; a call in flight waits too, its deadline runs on. Idempotent."""

    async def resume(self) -> None:
        """Let them go on. Idempotent."""

    async def set_timeout(self, seconds: float | None) -> None:
        """Kill it so many wall seconds from now; None is never. Replaces what was set before."""

    async def kill(self) -> None:
        """End it; idempotent. All that the agent ran or wrote is gone when this returns; a backend may
        keep an emptied folder, and a process that never ran agent code, for its next sandbox."""


class SandboxProvider(Protocol):
    """Makes sandboxes of one backend."""

    async def start(self) -> None:
        """Probe the guarantees and warm up.

        Raises:
            SandboxUnavailable: a guarantee that is required cannot be given; the text says which and what
                to do.
        """

    @property
    def guarantees(self) -> Guarantees:
        """As probed by `start`."""

    @property
    def capacity(self) -> int:
        """Sandboxes that may be alive at once; `create` waits beyond that."""

    @property
    def live(self) -> int:
        """Sandboxes that are not killed."""

    async def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: Snapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> Sandbox:
        """A fresh sandbox; `owner` (a rollout id) is written down first.

        Args:
            environment: files and database it begins with; not together with `snapshot`.
            snapshot: what it begins with, taken or loaded by this provider.
            limits: else the provider's.
            network: "none", or the name of a network that the backend grants.
            require: guarantees that must be enforced.

        Raises:
            DeadlineExceeded: no room.
            LeaseRevoked: the pool wants the machine back.
            SandboxError: the environment's SQL failed, or such a network is not granted.
            SandboxUnavailable: a guarantee in `require` is not enforced; the text says which.
        """

    async def connect(self, id: str) -> Sandbox:
        """The live sandbox of that id. Raises `SandboxLost` where there is none."""

    async def load(self, path: Path) -> Snapshot:
        """A snapshot that was saved. Raises `SandboxError` where its content is not what its name says."""

    async def close(self) -> None:
        """Kill every sandbox and end the provider itself; idempotent."""
