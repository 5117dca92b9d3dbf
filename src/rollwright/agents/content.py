"""Content inside a chat template: what spells a control token is broken by a barrier character.

Role: keeps content apart from template text while a template may look at it, trim it and cut it. Neighbours:
`chat_template` breaks with it, renders, and has the codec drop the barriers after it has looked for control
names. Invariants: no control name in the rendered text begins or ends inside a foreign content; without the
barrier the content is what it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

STAND_IN = "\U0010ffff"
"""What every barrier is compared as: texts with different barriers are alike where nothing else differs."""


def barrier_for(texts: Iterable[str]) -> str:
    """A character that stands in none of `texts`, neither as itself nor as JSON escapes it."""
    joined = "\n".join(texts)
    candidates = (chr(code) for low, high in _FREE for code in range(low, high))
    return next(c for c in candidates if c not in joined and escaped(c) not in joined)


_FREE = ((0xFDD0, 0xFDF0), (0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
"""Noncharacters, then private use: no text can hold all of them by accident."""


def escaped(barrier: str) -> str:
    """The barrier as JSON writes it in ASCII."""
    return json.dumps(barrier)[1:-1]


class Breaker:
    """Breaks content where it could spell one of `names`."""

    def __init__(self, names: Iterable[str]) -> None:
        found = sorted(names, key=len, reverse=True)
        self._edges = re.compile("|".join(_edge(chars) for chars in _edges(found)) or "(?!)")
        self._names = re.compile("|".join(map(re.escape, found)) or "(?!)")

    def foreign(self, text: str, barrier: str) -> str:
        """User, tool and system content: a barrier behind each character that begins a name and before each
        that ends one, so that no part of it, wherever a template puts it, begins or ends a name."""
        return self._edges.sub(lambda found: f"{barrier}{found.group()}{barrier}", text)

    def own(self, text: str, barrier: str) -> str:
        """What the policy spelled with ordinary tokens: a barrier inside each whole name, and nowhere else,
        so that templates find their marks in what it said."""
        return self._names.sub(lambda found: found.group()[0] + barrier + found.group()[1:], text)

    def nested(self, value: Any, barrier: str) -> Any:
        """`foreign` of every string in a JSON value."""
        match value:
            case str():
                return self.foreign(value, barrier)
            case Mapping():
                return {self.foreign(k, barrier): self.nested(v, barrier) for k, v in value.items()}
            case list() | tuple():
                return [self.nested(each, barrier) for each in value]
        return value


def enclosed(names: Iterable[str], before: str, after: str) -> str:
    """A name that content between `before` and `after` could be the middle of; "" where there is none."""
    for name in names:
        for cut in range(1, len(name) - 1):
            ends = (name[end:] for end in range(cut + 1, len(name)))
            if before.endswith(name[:cut]) and any(after.startswith(end) for end in ends):
                return name
    return ""


def strings(value: Any) -> Iterable[str]:
    """Every string in a JSON value."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, inner in value.items():
                yield key
                yield from strings(inner)
        case list() | tuple():
            for each in value:
                yield from strings(each)


def _edges(names: list[str]) -> list[set[str]]:
    return [{name[0] for name in names} | {name[-1] for name in names}] if names else []


def _edge(chars: set[str]) -> str:
    return "[" + "".join(re.escape(char) for char in sorted(chars)) + "]"
