"""The tool seam, and the protocol of the one door.

Role: what a tool is. Neighbours: `door` is the only caller, agents only know `Door`. Invariants: a tool runs only with a
permit that the door minted for exactly this action (`Permit`), after the guard allowed it; a tool turns bad arguments and
failures into a `ToolResult`, never into an exception.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msgspec import Struct

from rollwright.events import TraceContext
from rollwright.sandbox.base import Sandbox
from rollwright.types import Identity, Json, Task, ToolCall, ToolResult, ToolSpec


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


class Door(Protocol):
    """The one way to act."""

    async def invoke(self, action: Action) -> ToolResult:
        """Identity → guard → idempotency → registry → deadline → execution → audit → trace. Never raises for what the agent
        did; raises `SandboxLost` where the sandbox died, `DoorError` for an action without identity."""

    def specs(self, names: tuple[str, ...]) -> tuple[ToolSpec, ...]:
        """The registered tools of these names, for the prompt. Raises `PluginError` for an unknown one."""


Arguments = dict[str, Json]
