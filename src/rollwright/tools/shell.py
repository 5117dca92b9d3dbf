"""`shell`: a program with its arguments, no shell in between.

Role: a built-in tool. Neighbours: the sandbox runs it. Invariant: see `sealed`.
"""

from __future__ import annotations

from rollwright.tools import observe
from rollwright.tools.base import Action, Arguments
from rollwright.tools.sealed import SealedTool
from rollwright.types import SideEffect, ToolResult, ToolSpec


class ShellTool(SealedTool):
    """What the program wrote to its standard output."""

    spec = ToolSpec(
        name="shell",
        description="Run a program in the working folder.",
        parameters={
            "type": "object",
            "properties": {"argv": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
            "required": ["argv"],
            "additionalProperties": False,
        },
        side_effect=SideEffect.ONCE,
    )

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        execution = await action.sandbox.exec(arguments["argv"], timeout=action.timeout)
        return observe.executed(action.call, execution, observe.shown(execution.stdout))
