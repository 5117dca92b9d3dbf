"""What the model is told of a call: short and regular, because a small policy has to learn to read it.

Role: one vocabulary of observations. Neighbours: the tools and the door. Invariants: an error is one line of
at most `ERROR_CHARACTERS` that begins with `error: `; nothing is `none`; one cell is its value.
"""

from __future__ import annotations

from rollwright.tools.base import ERROR_CHARACTERS
from rollwright.types import CallStatus, ExecResult, Json, RowSet, ToolCall, ToolResult

OBSERVATION_CHARACTERS = 2000
"""Longer observations are cut, with `…` at the end."""
NONE = "none"

_WORDS = {
    CallStatus.TIMEOUT: "timeout",
    CallStatus.MEMORY: "out of memory",
    CallStatus.OUTPUT: "too much output",
    CallStatus.LOST: "the interpreter died",
}


def clean(text: str) -> str:
    """`text` as every reader takes it: lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode()


def error(text: str) -> str:
    """An error observation: `text` in one line."""
    line = clean(" ".join(text.split())) or "failed"
    whole = f"error: {line}"
    return whole if len(whole) <= ERROR_CHARACTERS else whole[: ERROR_CHARACTERS - 1] + "…"


def shown(text: str) -> str:
    """Output as an observation."""
    text = clean(text.rstrip("\n"))
    if len(text) > OBSERVATION_CHARACTERS:
        text = text[: OBSERVATION_CHARACTERS - 1] + "…"
    return text or NONE


def table(rows: RowSet | None) -> str:
    """One cell → its value; rows by newline, columns by `|`."""
    if rows is None:
        return NONE
    return shown("\n".join("|".join(map(_cell, row)) for row in rows.rows))


def _cell(value: Json) -> str:
    return "NULL" if value is None else str(value)


def failure(call: ToolCall, status: CallStatus, text: str) -> ToolResult:
    """A call that ended without being executed, or badly."""
    return ToolResult(call=call.id, status=status, content=error(text))


def executed(call: ToolCall, execution: ExecResult, content: str) -> ToolResult:
    """A call that the sandbox answered: `content` where it went well, else what went wrong."""
    if execution.status is not CallStatus.OK:
        lines = execution.stderr.strip().splitlines()
        content = error(
            _WORDS.get(execution.status) or (lines[-1] if lines else f"exit code {execution.exit_code}")
        )
    return ToolResult(call=call.id, status=execution.status, content=content, execution=execution)
