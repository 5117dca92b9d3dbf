"""`python`: code in the sandbox's interpreter, whose variables stay from call to call.

Role: a built-in tool. Neighbours: the sandbox runs it. Invariant: see `sealed`.
"""

from __future__ import annotations

from rollwright.tools import observe
from rollwright.tools.base import Action, Arguments
from rollwright.tools.sealed import SealedTool
from rollwright.types import SideEffect, ToolResult, ToolSpec


class PythonTool(SealedTool):
    """What the code printed; where it printed nothing, the value of its last expression."""

    spec = ToolSpec(
        name="python",
        description="Run Python code. Variables stay between calls. Print, or end with an expression.",
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string", "minLength": 1}},
            "required": ["code"],
            "additionalProperties": False,
        },
        side_effect=SideEffect.ONCE,
    )

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        execution = await action.sandbox.run_code(arguments["code"], timeout=action.timeout)
        content = observe.shown(execution.stdout.strip("\n") or execution.value or "")
        return observe.executed(action.call, execution, content)
