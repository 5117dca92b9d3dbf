"""From a constraint to a grammar in the library's notation.

Role: one grammar for each kind. Neighbours: `schema` reads schemas, `guided` compiles what comes out.
Invariant: a source that cannot be held to raises, naming the feature; nothing is relaxed.

JSON is compact: no whitespace but, in calls, one space after `,` and `:`. Calls have the form of the
vocabulary's marks: `<call>NAME {…}</call>` (`agents.calls`) or `<tool_call>{"name": …, "arguments":
…}</tool_call>` (Hermes), with text around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollwright.engine.grammar.needs import LIMITLESS, Needs
from rollwright.engine.grammar.schema import narrowed, read
from rollwright.errors import ConstraintError
from rollwright.types import Constraint, ConstraintKind, Json

OURS = ("<call>", "</call>")
HERMES = ("<tool_call>", "</tool_call>")
_COMPACT = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
_SPACED = {**_COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
_NAME = re.compile(r"[A-Za-z_][\w.\-]*\Z")
_UNKNOWN_GROWTH = 16
"""Assumed where the source is no schema."""
_LINES = 400
"""Most lines of a grammar. A rule has its own, and the library follows a chain of rules on its stack, which
held at 1,000 rules and overflowed at 3,000 in 8 MiB."""
_BRACKETS = 1000
"""Most brackets that a grammar opens; each is a step on that stack, which held at 1,950 with 390 rules."""
_SAYS_NOTHING = frozenset({"description", "title", "default", "examples"})
_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_PLAIN = rf'/[^\s\x00-\x1f{{}}\["][^\x00]*/ & ~/(true|false|null|{_NUMBER})\s*/'
"""Text that the parser of calls takes as it stands: no JSON value, and nothing that may begin one."""


@dataclass(frozen=True)
class Source:
    """A grammar in Lark's notation as llguidance reads it."""

    grammar: str
    growth: int
    """Tokens that one more token may add to the shortest end."""
    marks: tuple[bytes, ...] = ()
    """Text that only control tokens may spell."""


def source(constraint: Constraint, control: Mapping[str, int]) -> Source:
    """The grammar of a constraint for a vocabulary with these control tokens.

    Raises:
        ConstraintError: the source cannot be read or asks for what cannot be enforced.
    """
    try:
        return _source(constraint, control)
    except ConstraintError:
        raise
    except (
        TypeError,
        AttributeError,
        LookupError,
        ValueError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ConstraintError(
            f"{constraint.kind.value}: the source is malformed ({type(error).__name__}: {error}):"
            f" {constraint.source[:80]!a}"
        ) from error


def _source(constraint: Constraint, control: Mapping[str, int]) -> Source:
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema = narrowed(read(constraint.source))
            return Source(f"start: {_json(schema, _COMPACT)}\n", Needs(schema).growth())
        case ConstraintKind.REGEX:
            return Source(f"start: /{_slashed(constraint.source)}/\n", _UNKNOWN_GROWTH)
        case ConstraintKind.GRAMMAR:
            _check_grammar(constraint.source)
            return Source(constraint.source, _UNKNOWN_GROWTH)
        case ConstraintKind.CHOICE:
            choices = _choices(constraint.source)
            words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return Source(f"start: CHOICE\nCHOICE: {words}\n", max(map(len, choices)))
        case ConstraintKind.TOOLS:
            return _tools(read(constraint.source), control)


def _check_grammar(text: str) -> None:
    """Refuse what would loosen the library or overflow its stack."""
    if re.search(r"%(import|llguidance)", text):
        raise ConstraintError("a grammar sets no options of the library and imports nothing")
    if (lines := text.count("\n") + 1) > _LINES:
        raise ConstraintError(f"a grammar of {lines} lines; at most {_LINES} can be enforced")
    if (opened := text.count("(") + text.count("[")) > _BRACKETS:
        raise ConstraintError(f"a grammar with {opened} brackets opened; at most {_BRACKETS} can be enforced")
    reader = json.JSONDecoder(object_pairs_hook=_no_options)
    for found in re.finditer(r"%json\s*", text):
        try:
            schema, _ = reader.raw_decode(text, found.end())
        except json.JSONDecodeError as error:
            raise ConstraintError(f"what follows %json is not JSON: {error}") from error
        narrowed(schema, "%json")


def _no_options(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object, escapes in its keys resolved, unless it sets options of the library."""
    if any(key == "x-guidance" for key, _ in pairs):
        raise ConstraintError("a grammar sets no options of the library: leave out x-guidance")
    return dict(pairs)


def _json(schema: Json, options: Mapping[str, Json]) -> str:
    if isinstance(schema, bool):
        if not schema:
            raise ConstraintError("the schema false allows nothing")
        schema = {}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _slashed(regex: str) -> str:
    """A regular expression between slashes: `/` and line breaks escaped."""
    if not regex:
        raise ConstraintError("a regular expression is not empty")
    regex = re.sub(r"\\(.)|/", lambda found: found.group() if found.group(1) else r"\/", regex, flags=re.S)
    return regex.replace("\n", r"\n").replace("\r", r"\r")


def _choices(text: str) -> list[str]:
    choices = read(text)
    if not isinstance(choices, list) or not choices:
        raise ConstraintError("a choice is a JSON list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ConstraintError("what is chosen from are strings that are not empty")
    return choices


def _tools(tools: Json, control: Mapping[str, int]) -> Source:
    if not isinstance(tools, list) or not tools:
        raise ConstraintError("tools are a JSON list of at least one tool")
    marks = next((pair for pair in (OURS, HERMES) if set(pair) <= control.keys()), None)
    if marks is None:
        raise ConstraintError(
            f"calls need the control tokens {OURS[0]} and {OURS[1]}, or {HERMES[0]} and {HERMES[1]}; this"
            f" vocabulary has {', '.join(sorted(control)) or 'none'}"
        )
    rules, most = [], 1
    for number, tool in enumerate(tools):
        name, schema = _tool(tool, marks)
        needs = Needs(schema)
        most = max(most, needs.growth(), len(name) + needs.of(schema) % LIMITLESS + 32)
        rules.append(f"tool_{number}: {_call(number, name, schema, marks == OURS)}")
        rules.append(f"arguments_{number}: {_json(schema, _SPACED)}")
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    if marks == HERMES:
        rules += [r"NEWLINE: /\n/", "SPACE: / /"]
    if any("PLAIN" in rule.partition("%json")[0] for rule in rules):
        rules.append(f"PLAIN: {_PLAIN}")
    opened, closed = (f"<[{control[mark]}]>" for mark in marks)
    lines = ["start: TEXT? (call TEXT?)*", r"TEXT: /(.|\n)+/", f"call: {opened} ({names}) {closed}", *rules]
    return Source("\n".join([*lines, ""]), most, tuple(mark.encode() for mark in marks))


def _tool(tool: Json, marks: tuple[str, str]) -> tuple[str, Json]:
    """Name and narrowed parameters of one tool."""
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ConstraintError("a tool has a name and parameters")
    name, parameters = tool["name"], tool.get("parameters") or {"type": "object", "properties": {}}
    if marks == OURS and not _NAME.match(name):
        raise ConstraintError(f"{name!r} is no name that a call can have")
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ConstraintError(f"tool {name}: parameters are the JSON schema of an object")
    text = json.dumps(parameters, ensure_ascii=False)
    if any(mark in text for mark in marks):
        raise ConstraintError(f"tool {name}: its parameters spell {marks[0]} or {marks[1]}")
    return name, narrowed({**parameters, "type": "object"}, f"tool {name}")


def _call(number: int, name: str, schema: dict[str, Json], ours: bool) -> str:
    """What stands between the marks; in our form arguments may be left out where none are required, and a
    single required string may stand as it is, where all that is asked of it is not to be empty."""
    arguments = f"arguments_{number}"
    if not ours:
        named, begin = json.dumps('{"name":'), json.dumps('"arguments":')
        head = f'{named} SPACE? {json.dumps(json.dumps(name))} "," SPACE?'
        return f'NEWLINE? {head} {begin} SPACE? {arguments} "}}" NEWLINE?'
    forms = [f"{json.dumps(name + ' ')} {arguments}"]
    required = schema.get("required", [])
    if not required:
        forms.append(json.dumps(name))
    elif len(required) == 1:
        said = schema.get("properties", {}).get(required[0])
        if (
            isinstance(said, dict)
            and said.get("type") == "string"
            and said.keys() - _SAYS_NOTHING - {"minLength"} == {"type"}
            and said.get("minLength", 0) <= 1  # plain text is never empty
        ):
            forms.append(f"{json.dumps(name + ' ')} PLAIN")
    return " | ".join(forms)
