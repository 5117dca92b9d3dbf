"""`sql`: one statement on the task's database.

Role: a built-in tool. Neighbours: the sandbox runs it. Invariant: see `sealed`.
"""

from __future__ import annotations

from rollwright.tools import observe
from rollwright.tools.base import Action, Arguments
from rollwright.tools.sealed import SealedTool
from rollwright.types import SideEffect, ToolResult, ToolSpec


class SqlTool(SealedTool):
    """Rows by newline, columns by `|`; one cell is its value."""

    spec = ToolSpec(
        name="sql",
        description="Run one SQLite statement on the database.",
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string", "minLength": 1}},
            "required": ["query"],
            "additionalProperties": False,
        },
        side_effect=SideEffect.ONCE,
    )

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        execution = await action.sandbox.sql(arguments["query"], timeout=action.timeout)
        return observe.executed(action.call, execution, observe.table(execution.rows))
