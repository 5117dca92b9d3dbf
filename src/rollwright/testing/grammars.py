"""Conformance suite of the grammar seam: what every `Grammars` must do.

Role: each check takes a maker of a fresh `Subject` and fails with an `AssertionError`. Neighbours: contract
tests parametrise over `CHECKS` and implementations. Invariant: no check knows an implementation; random
walks take any token that a mask allows, so that what holds for them holds for any policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollwright.engine.grammar.base import Grammars, Matcher
from rollwright.errors import ConstraintError
from rollwright.model.base import Vocabulary
from rollwright.types import Constraint, ConstraintKind

Choose = Callable[[list[int]], int]
"""Which of the allowed tokens comes next."""


@dataclass(frozen=True)
class Subject:
    """Grammars over a vocabulary that has every byte, the pieces `{"` and `"}`, and control tokens."""

    grammars: Grammars
    vocabulary: Vocabulary
    stop: int
    """A control token."""

    def matcher(self, kind: str, source: str, budget: int | None = None) -> Matcher:
        """A fresh one."""
        return self.grammars.matcher(constraint(kind, source), (self.stop,), budget)

    def id(self, piece: bytes) -> int:
        """The text token that spells `piece`."""
        return self.vocabulary.pieces.index(piece)

    def text(self, ids: list[int]) -> bytes:
        """What tokens spell, the stop token left out."""
        return b"".join(self.vocabulary.pieces[id] for id in ids if id != self.stop)


Make = Callable[[], Subject]

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
    }
)
SOURCES = (
    ("json_schema", PERSON),
    ("regex", "(ab|é)*c{2,4}"),
    ("choice", '["yes", "yes, please", "no"]'),
    ("grammar", 'start: "(" start ")" | "x"'),
)


def constraint(kind: str, source: str) -> Constraint:
    """A constraint by the value of its kind."""
    return Constraint(kind=ConstraintKind(kind), source=source)


def allowed(subject: Subject, matcher: Matcher) -> list[int]:
    """The tokens that a matcher's mask allows."""
    from rollwright.engine.grammar import bits

    size = len(subject.vocabulary.pieces)
    mask = bits.of(range(size), size)  # whatever was in it
    matcher.mask(mask)
    return bits.tokens(mask, size)


def walk(subject: Subject, matcher: Matcher, choose: Choose, limit: int) -> list[int]:
    """At most `limit` allowed tokens, each accepted; stops where the matcher has ended.

    On the way a stop token is allowed exactly where the word is whole, and something is allowed as long as
    the matcher has not ended.
    """
    found: list[int] = []
    while len(found) < limit and not matcher.ended:
        may = allowed(subject, matcher)
        assert may, f"nothing is allowed after {subject.text(found)!r}, and it has not ended"
        assert (subject.stop in may) == matcher.complete, f"stop token after {subject.text(found)!r}"
        token = choose(may)
        matcher.accept(token)
        found.append(token)
    return found


def at_random(seed: int) -> Choose:
    """Any token, equally likely."""
    rng = np.random.default_rng(seed)
    return lambda may: may[int(rng.integers(len(may)))]


def check_what_is_allowed_is_accepted(make: Make) -> None:
    """Random walks through every kind run to their limit or end, by the rules of `walk`."""
    subject = make()
    for kind, source in SOURCES:
        for seed in range(5):
            matcher = subject.matcher(kind, source)
            walk(subject, matcher, at_random(seed), 60)
            assert not matcher.ended or matcher.complete


def check_whole_within_its_budget(make: Make) -> None:
    """With a budget that the shortest word leaves room in, any walk ends in a word of the language."""
    subject = make()
    for budget in (40, 64, 200):
        for seed in range(5):
            matcher = subject.matcher("json_schema", PERSON, budget)
            said = subject.text(walk(subject, matcher, at_random(seed), budget))
            value = json.loads(said)
            assert matcher.complete and {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
            assert isinstance(value["name"], str) and 0 <= value["age"] <= 150
            matcher = subject.matcher("regex", "(ab|é)*c{2,4}", budget)
            said = subject.text(walk(subject, matcher, at_random(seed), budget))
            assert matcher.complete and re.fullmatch("(ab|é)*c{2,4}", said.decode())


def check_tokens_over_borders(make: Make) -> None:
    """A token that spells the end of one thing and the beginning of the next is allowed where both are."""
    subject = make()
    matcher = subject.matcher("json_schema", PERSON)
    assert subject.id(b'{"') in allowed(subject, matcher)
    matcher.accept(subject.id(b'{"'))
    assert subject.id(b'"}') not in allowed(subject, matcher)
    matcher = subject.matcher("json_schema", '{"type": "object", "properties": {"k": {"const": "v"}}}')
    for byte in b'{"k":"v':
        matcher.accept(subject.id(bytes([byte])))
    assert subject.id(b'"}') in allowed(subject, matcher)
    matcher.accept(subject.id(b'"}'))
    assert matcher.complete and matcher.ended


def check_characters_of_many_tokens(make: Make) -> None:
    """A character may come byte by byte; inside of it only its next byte is allowed, and no stop."""
    subject = make()
    matcher = subject.matcher("regex", "é*")
    lead, last = "é".encode()
    before = matcher.complete
    matcher.accept(subject.id(bytes([lead])))
    inside, may = matcher.complete, allowed(subject, matcher)
    matcher.accept(subject.id(bytes([last])))
    assert (before, inside, matcher.complete) == (True, False, True) and may == [subject.id(bytes([last]))]


def check_end(make: Make) -> None:
    """A word that cannot be made longer has ended, whole; so has one that got its stop token."""
    subject = make()
    matcher = subject.matcher("choice", '["no"]')
    for byte in b"no":
        assert not matcher.ended and not matcher.complete
        matcher.accept(subject.id(bytes([byte])))
    assert matcher.ended and matcher.complete
    matcher = subject.matcher("regex", "a*")
    matcher.accept(subject.stop)
    assert matcher.ended and matcher.complete


def check_matchers_are_independent(make: Make) -> None:
    """Two completions under one constraint know nothing of each other."""
    subject = make()
    one, other = (subject.matcher("regex", "ab+") for _ in range(2))
    one.accept(subject.id(b"a"))
    assert subject.id(b"b") not in allowed(subject, other)
    one.accept(subject.id(b"b"))
    assert one.complete and not other.complete


def check_what_is_none_is_refused(make: Make) -> None:
    """A source that cannot be read, or whose words cannot be held to, raises and says so."""
    subject = make()
    wrong = (
        ("json_schema", "{"),
        ("json_schema", '{"type": "text"}'),
        ("json_schema", '{"type": "array", "uniqueItems": true}'),
        ("regex", "("),
        ("regex", "(a)\\1"),
        ("grammar", "start: unknown"),
        ("choice", "[]"),
        ("choice", '"yes"'),
        ("tools", "{}"),
    )
    for kind, source in wrong:
        try:
            subject.matcher(kind, source)
        except ConstraintError as error:
            assert str(error)
        else:
            raise AssertionError(f"{kind} {source!r} was taken")


CHECKS = (
    check_what_is_allowed_is_accepted,
    check_whole_within_its_budget,
    check_tokens_over_borders,
    check_characters_of_many_tokens,
    check_end,
    check_matchers_are_independent,
    check_what_is_none_is_refused,
)
