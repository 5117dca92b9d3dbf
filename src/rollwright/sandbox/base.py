"""The sandbox seam: an isolated place that runs an agent's actions and is gone afterwards.

Role: what every backend offers. Neighbours: tools act through it, the rollout factory owns its life,
rewards look into it. Invariants: it says which guarantees it really gives (`Guarantees`, from a probe that
tries the escape, not from a name); limits end in a typed `CallStatus`, never in an exception; after `close`
nothing of it is left. A lost sandbox raises `SandboxLost`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from rollwright.types import Environment, ExecResult, Json


class Guarantee(enum.Enum):
    """How well one thing is kept."""

    ENFORCED = "enforced"
    BEST_EFFORT = "best_effort"
    ABSENT = "absent"


class Guarantees(Struct, frozen=True, kw_only=True):
    """What a backend keeps the agent from, as probed on this machine."""

    fs: Guarantee
    net: Guarantee
    pids: Guarantee
    memory: Guarantee
    disk: Guarantee
    kill: Guarantee
    kernel_surface: Guarantee = Guarantee.ABSENT

    def missing(self, required: Sequence[str]) -> list[str]:
        """Those of `required` (field names) that are not enforced."""
        return [name for name in required if getattr(self, name) is not Guarantee.ENFORCED]


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of one sandbox."""

    cpu_seconds: int = 60
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 32 * 2**20
    processes: int = 16
    output_bytes: int = 64 * 2**10
    """What one call may print; more ends it with `CallStatus.OUTPUT`."""


class Sandbox(Protocol):
    """One environment. Calls on one sandbox run one after another. A call past its deadline is ended, and
    the sandbox with it where the interpreter could not be interrupted (the result is `TIMEOUT`; the next
    call raises `SandboxLost`)."""

    id: str

    @property
    def guarantees(self) -> Guarantees:
        """What this backend keeps, as probed."""

    async def exec(self, argv: Sequence[str], *, timeout: float, stdin: str = "") -> ExecResult:
        """Run a program in the sandbox's working folder."""

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        """Run Python in the sandbox's persistent interpreter: variables stay from call to call; the value
        of a last expression is in `value` (its repr)."""

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        """Run one SQL statement on the sandbox's SQLite database; result sets are in `rows`."""

    async def read_file(self, path: str) -> bytes:
        """Contents of a file below the working folder.

        Raises:
            FileNotFoundError: there is none.
            PermissionError: the path leads outside (by `..`, a link, or an absolute path).
        """

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below the working folder, making folders. Raises as `read_file`."""

    async def snapshot(self) -> Environment:
        """Files and database now, as an environment another sandbox can start from."""

    async def fork(self) -> Sandbox:
        """A second sandbox with the same files and database; interpreter variables are not carried over."""

    async def close(self) -> None:
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

    async def create(self, environment: Environment, *, owner: str, limits: Limits | None = None) -> Sandbox:
        """A fresh sandbox holding `environment`; `owner` (a rollout id) is written down first."""

    async def close(self) -> None:
        """Close every sandbox and the provider itself; idempotent."""
