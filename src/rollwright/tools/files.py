"""`read_file` and `write_file`: text files below the working folder.

Role: built-in tools. Neighbours: the sandbox keeps the paths inside. Invariant: see `sealed`.
"""

from __future__ import annotations

from rollwright.tools import observe
from rollwright.tools.base import Action, Arguments
from rollwright.tools.sealed import SealedTool
from rollwright.types import CallStatus, SideEffect, ToolResult, ToolSpec

_PATH = {"type": "string", "minLength": 1, "maxLength": 4096}


class ReadFile(SealedTool):
    """The file's text."""

    spec = ToolSpec(
        name="read_file",
        description="Read a text file of the working folder.",
        parameters={
            "type": "object",
            "properties": {"path": _PATH},
            "required": ["path"],
            "additionalProperties": False,
        },
        side_effect=SideEffect.NONE,
    )

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        try:
            data = await action.sandbox.files.read(arguments["path"])
        except OSError as problem:
            return observe.failure(action.call, CallStatus.ERROR, problem.strerror or str(problem))
        content = observe.shown(data.decode("utf-8", "replace"))
        return ToolResult(call=action.call.id, status=CallStatus.OK, content=content)


class WriteFile(SealedTool):
    """`ok`."""

    spec = ToolSpec(
        name="write_file",
        description="Write a text file into the working folder, replacing it if it exists.",
        parameters={
            "type": "object",
            "properties": {"path": _PATH, "text": {"type": "string"}},
            "required": ["path", "text"],
            "additionalProperties": False,
        },
        side_effect=SideEffect.IDEMPOTENT,
    )

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        data = arguments["text"].encode("utf-8", "replace")
        try:
            await action.sandbox.files.write(arguments["path"], data)
        except OSError as problem:
            return observe.failure(action.call, CallStatus.ERROR, problem.strerror or str(problem))
        return ToolResult(call=action.call.id, status=CallStatus.OK, content="ok")
