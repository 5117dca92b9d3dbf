"""What rewards read: values in answers and in what calls gave.

Role: comparing and finding values, as pure functions. Neighbours: `rules`, `replay`. Invariant: numbers
compare as numbers, everything else as stripped, case-folded text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollwright.types import CallStatus, ExecResult, Json, Rollout, ToolCall, ToolResult

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z")

Place = tuple[str, int, int]
"""Where a value stands in a result: ("cell", row, column), ("stdout", line, word) or ("value", 0, word)."""


def same(given: str, expected: str) -> bool:
    """Whether two texts mean the same value."""
    given, expected = given.strip(), expected.strip()
    if _NUMBER.match(given) and _NUMBER.match(expected):
        return float(given) == float(expected)
    return given.casefold() == expected.casefold()


def same_json(given: Json, expected: Json) -> bool:
    """As `==`, but True is not 1."""
    if isinstance(given, bool) != isinstance(expected, bool):
        return False
    return bool(given == expected)


def cell(value: Json) -> str:
    """A cell of a result set as text."""
    return "" if value is None else str(value)


def places(execution: ExecResult) -> Iterator[tuple[Place, str]]:
    """Every value of a result with its place, in reading order."""
    if execution.rows is not None:
        for r, row in enumerate(execution.rows.rows):
            for c, value in enumerate(row):
                yield ("cell", r, c), cell(value)
    for line, text in enumerate(execution.stdout.splitlines()):
        for number, word in enumerate(_words(text)):
            yield ("stdout", line, number), word
    for number, word in enumerate(_words(execution.value or "")):
        yield ("value", 0, number), word


def _words(text: str) -> list[str]:
    return re.findall(r"[^\s,;:()\[\]{}'\"]+", text)


def executed(rollout: Rollout) -> list[tuple[ToolCall, ToolResult]]:
    """Each call of the rollout with its result, in order."""
    return [pair for turn in rollout.turns for pair in zip(turn.calls, turn.results, strict=False)]


def occurs(value: str, result: ToolResult) -> bool:
    """Whether `value` is a cell, the whole output or a word of the output of a call that succeeded."""
    if result.status is not CallStatus.OK:
        return False
    execution = result.execution
    if execution is None:
        return result.content.strip() == value
    whole = (execution.stdout.strip(), execution.value)
    return value in whole or any(found == value for _, found in places(execution))
