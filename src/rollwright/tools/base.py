"""The tool seam, and the protocol of the one door.

Role: what a tool is. Neighbours: `door` is the only caller, agents only know `Door`. Invariants: a tool
runs only with a permit that the door minted for exactly this action (`Permit`), after the guard allowed it;
a tool turns bad arguments and failures into a `ToolResult`, never into an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol, runtime_checkable

from msgspec import Struct

from rollwright.errors import DoorError
from rollwright.events import TraceContext
from rollwright.sandbox.base import Files, Guarantees, Info, Limits, Sandbox, Snapshot
from rollwright.types import (
    ExecResult,
    Identity,
    Json,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

ERROR_CHARACTERS = 80
"""Length of an error observation at most: the policy reads every one of them."""


class Action(Struct, frozen=True, kw_only=True):
    """One call on its way through the door: who wants what, where, and by when (seconds from now)."""

    call: ToolCall
    identity: Identity
    task: Task
    sandbox: Sandbox
    trace: TraceContext
    timeout: float
    history: tuple[ToolCall, ...] = ()
    """Earlier calls of the same rollout, for sequence rules."""


@runtime_checkable
class Tool(Protocol):
    """One tool. Implementations derive from `rollwright.tools.sealed.SealedTool`, which checks the permit."""

    @property
    def spec(self) -> ToolSpec:
        """Name, description, JSON schema of the arguments, side effect."""

    async def _run(self, arguments: dict[str, Json], action: Action) -> ToolResult:
        """Do it. Sealed when the class is made or registered: without the door's permit it raises
        `DoorError`."""


class Door(Protocol):
    """The one way to act."""

    async def invoke(self, action: Action) -> ToolResult:
        """Identity → guard → idempotency → registry → deadline → execution → audit → trace. Never raises
        for what the agent did; raises `SandboxLost` where the sandbox died, `DoorError` for an action
        without identity."""

    def specs(self, names: tuple[str, ...]) -> tuple[ToolSpec, ...]:
        """The registered tools of these names, for the prompt. Raises `PluginError` for an unknown one."""


class SandboxHandle:
    """What an agent holds instead of its sandbox: enough to name it in an `Action`, useless to act with. Only
    the door opens it; what acts raises `DoorError`, its files too."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sealed = sandbox
        self.id = sandbox.id
        self.limits: Limits = sandbox.limits

    @property
    def guarantees(self) -> Guarantees:
        """What the sandbox keeps, as probed."""
        return self._sealed.guarantees

    def info(self) -> Info:
        """What is known of the sandbox."""
        return self._sealed.info()

    def _refuse(self) -> NoReturn:
        raise DoorError(f"sandbox {self.id} was used past the door; call Door.invoke with an Action instead")

    @property
    def files(self) -> Files:
        """Raises `DoorError`, as every method below."""
        self._refuse()

    async def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        self._refuse()

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        self._refuse()

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        self._refuse()

    async def snapshot(self) -> Snapshot:
        self._refuse()

    async def restore(self, snapshot: Snapshot) -> None:
        self._refuse()

    async def fork(self, count: int = 1, *, live: bool = False) -> list[Sandbox]:
        self._refuse()

    async def pause(self) -> None:
        self._refuse()

    async def resume(self) -> None:
        self._refuse()

    async def set_timeout(self, seconds: float | None) -> None:
        self._refuse()

    async def kill(self) -> None:
        self._refuse()


Arguments = dict[str, Json]
