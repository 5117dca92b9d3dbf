"""From what an assistant turn says to the calls in it.

Role: the parser, and its inverse `render`. Neighbours: `episode` acts on what it gives. Invariant: any text
gives plain text, calls or malformed calls with a reason; nothing is raised, and whatever is given can be
stored.

The form is `<call>NAME REST</call>`. REST that begins with `{` is a JSON object of arguments; any other
text is the tool's single required string parameter as it stands, so that a policy need not learn JSON
escapes. Between other marks (`<tool_call>`, as Hermes and Qwen write it) stands one JSON object with `name`
and `arguments`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from rollwright.types import Json, Record, ToolCall, ToolSpec

OPEN, CLOSE = "<call>", "</call>"

_MARK = re.compile(f"{OPEN}|{CLOSE}")
OWN = (OPEN, CLOSE)
_NAME = re.compile(r"[A-Za-z_][\w.\-]*\Z")
_LONGEST = 200
"""Characters of a malformed call that are kept."""


class ParsedCall(Record, frozen=True, kw_only=True):
    """A call; where `problem` is not empty it is malformed, and must not be acted on."""

    call: ToolCall
    problem: str = ""


class ParsedTurn(Record, frozen=True, kw_only=True):
    """An assistant turn: its calls in order, or (without any) plain text."""

    text: str
    calls: tuple[ParsedCall, ...] = ()


class _Problem(ValueError):
    """Why a call is malformed, in a few words for the model."""


def parse(
    text: str,
    specs: Sequence[ToolSpec],
    *,
    rollout: str,
    turn: int,
    cut: bool = False,
    marks: tuple[str, str] = OWN,
) -> ParsedTurn:
    """The calls of one assistant turn. Action ids are `rollout/turn/index`; `cut` says that the turn ended
    without its stop token; `marks` open and close a call."""
    calls: list[ParsedCall] = []
    for body, problem in _bodies(text, cut, marks):
        id = f"{rollout}/{turn}/{len(calls)}"
        try:
            if problem:
                raise _Problem(problem)
            call = _call(id, body, specs) if marks == OWN else _object_call(id, body)
            calls.append(ParsedCall(call=call))
        except _Problem as error:
            kept = ToolCall(id=id, name="", arguments={}, raw=body[:_LONGEST])
            calls.append(ParsedCall(call=kept, problem=str(error)))
    return ParsedTurn(text=text, calls=tuple(calls))


def _bodies(text: str, cut: bool, marks: tuple[str, str]) -> list[tuple[str, str]]:
    """(what stands between the marks, problem) of each outermost call."""
    opens, closes = marks
    bodies: list[tuple[str, str]] = []
    depth, start, nested = 0, 0, False
    for mark in re.finditer(f"{re.escape(opens)}|{re.escape(closes)}", text):
        if mark.group() == opens:
            depth += 1
            if depth == 1:
                start, nested = mark.end(), False
            nested = nested or depth > 1
        elif depth == 0:
            bodies.append(("", f"{closes} without {opens}"))
        else:
            depth -= 1
            if depth == 0:
                bodies.append((text[start : mark.start()], "a call inside a call" if nested else ""))
    if depth:
        bodies.append((text[start:], "call cut at the token limit" if cut else f"{closes} is missing"))
    elif cut and not bodies and any(text.endswith(opens[:size]) for size in range(2, len(opens))):
        bodies.append(("", "call cut at the token limit"))
    return bodies


def _object_call(id: str, body: str) -> ToolCall:
    """A call that is one JSON object. Arguments may be an object, or one as text (which some templates
    write)."""
    value = _json(body)
    if not isinstance(value, dict):
        raise _Problem("a call must be a JSON object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise _Problem("not a tool name" if name else "no tool name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise _Problem("arguments must be a JSON object")
    return ToolCall(id=id, name=name, arguments=_storable(arguments), raw=body)


def _call(id: str, body: str, specs: Sequence[ToolSpec]) -> ToolCall:
    name, rest = [*body.split(maxsplit=1), "", ""][:2]
    rest = rest.strip()
    if not name:
        raise _Problem("no tool name")
    if not _NAME.match(name):
        raise _Problem("not a tool name")
    spec = next((spec for spec in specs if spec.name == name), None)
    return ToolCall(id=id, name=name, arguments=_storable(_arguments(rest, spec)), raw=body)


def _storable(arguments: dict[str, Json]) -> dict[str, Json]:
    try:
        msgspec.msgpack.encode(arguments)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise _Problem("arguments that cannot be stored") from error
    return arguments


def _arguments(rest: str, spec: ToolSpec | None) -> dict[str, Json]:
    if not rest:
        return {}
    value = _json(rest)
    if isinstance(value, dict):
        return value
    if value is not _NOT_JSON:
        raise _Problem(f"arguments must be a JSON object or text, got a JSON {_KINDS[type(value)]}")
    if rest.startswith("{"):
        raise _Problem("arguments are not valid JSON")
    parameter = "text" if spec is None else text_parameter(spec)
    if parameter is None:
        raise _Problem("this tool needs a JSON object of arguments")
    return {parameter: rest}


_NOT_JSON = object()
_KINDS = {str: "string", list: "list", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _json(text: str) -> Json:
    """`text` as JSON, `_NOT_JSON` where it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is not JSON")


def text_parameter(spec: ToolSpec) -> str | None:
    """Name of the single required string parameter; None where a tool has no such one."""
    required = spec.parameters.get("required", [])
    if not isinstance(required, list) or len(required) != 1:
        return None
    name = required[0]
    kind = spec.parameters.get("properties", {}).get(name, {}).get("type")
    return name if isinstance(name, str) and kind == "string" else None


def render(call: ToolCall, spec: ToolSpec) -> str:
    """What stands between the marks for `call`: `parse` gives its name and arguments back.

    Text stands as it is where that is read back as itself, and is written as JSON where it is not.
    """
    parameter = text_parameter(spec)
    if parameter is not None and set(call.arguments) == {parameter}:
        text = call.arguments[parameter]
        plain = isinstance(text, str) and text.strip() == text and text and not _MARK.search(text)
        if plain and not text.startswith("{") and _json(text) is _NOT_JSON:
            return f"{call.name} {text}"
    if not call.arguments:
        return call.name
    body = json.dumps(call.arguments, ensure_ascii=False)
    return f"{call.name} " + body.replace("<", "\\u003c")
