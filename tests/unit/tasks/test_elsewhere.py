"""Tasks are drawn again in an interpreter with another hash seed."""

from __future__ import annotations

import random

import pytest

from rollwright.errors import ConfigError
from rollwright.tasks.config import RecordsConfig
from rollwright.tasks.elsewhere import differing, movable
from rollwright.tasks.own import OwnTasks, Question
from rollwright.testing.tasksets import repeats

WORDS = {"oslo", "lima", "kyiv", "cairo", "delhi", "quito", "seoul", "tunis", "paris", "accra"}


class OfASet(OwnTasks):
    """Draws in the order of a set."""

    tools: tuple[str, ...] = ()

    def make(self, rng: random.Random) -> Question:
        word = list(WORDS)[rng.randrange(len(WORDS))]
        return Question(ask=f"{word} {rng.randint(0, 99)}", answer=word)


class Sorted(OfASet):
    """The same, sorted."""

    def make(self, rng: random.Random) -> Question:
        word = sorted(WORDS)[rng.randrange(len(WORDS))]
        return Question(ask=f"{word} {rng.randint(0, 99)}", answer=word)


class Unbuildable(Sorted):
    """Says no only there."""

    def build(self):  # type: ignore[no-untyped-def]
        raise ConfigError("not here")


def test_a_set_of_text_is_found() -> None:
    assert len(differing(OfASet(), 10)) > 10
    assert differing(Sorted(seed=4), 10) == []
    assert differing(RecordsConfig(hops=2), 3) == []


def test_the_conformance_suite_finds_it_too() -> None:
    with pytest.raises(AssertionError, match="other tasks in another process"):
        repeats(OfASet().build)
    repeats(Sorted().build)


def test_only_what_a_module_has_can_be_made_there() -> None:
    class Local(Sorted):
        pass

    assert movable(Sorted()) and not movable(Local()) and not movable(object())


def test_what_fails_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot be made in another interpreter: not here"):
        differing(Unbuildable(), 2)
