"""Tasks are drawn again in an interpreter with another hash seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.errors import ConfigError
from rollwright.tasks.base import TaskSet
from rollwright.tasks.config import RecordsConfig
from rollwright.tasks.elsewhere import HASH_SEEDS, differing, movable
from rollwright.tasks.own import OwnTasks, Question
from rollwright.testing.tasksets import repeats

WORDS = {"oslo", "lima", "kyiv", "cairo", "delhi", "quito", "seoul", "tunis", "paris", "accra"}


HERE: list[bool] = []


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
    """Says no only there, where nobody has set `here`."""

    def build(self) -> TaskSet:
        if not HERE:
            raise ConfigError("not here")
        return super().build()


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
    HERE.append(True)
    with pytest.raises(ConfigError, match="cannot be made in another interpreter: not here"):
        differing(Unbuildable(), 2)


@pytest.mark.parametrize("seed", HASH_SEEDS)
def test_it_is_found_whatever_hash_seed_this_process_has(seed: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_elsewhere as t; "
    code += "from rollwright.tasks.elsewhere import differing; print(len(differing(t.OfASet(), 10)))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) > 10
