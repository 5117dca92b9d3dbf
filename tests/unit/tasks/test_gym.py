"""Tasks of reasoning-gym: held out is held out, the package decides, and no answer is executed."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollwright.errors import ConfigError, MissingExtra
from rollwright.tasks.config import GymConfig
from rollwright.tasks.gym import GymScorer, data_sets
from rollwright.types import ScoredBy

pytestmark = pytest.mark.needs("reasoning-gym")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_no_question_is_in_both_splits_even_where_there_are_few() -> None:
    tasks = GymConfig(parameters=SMALL, heldout=40).build()  # 200 different questions in all
    heldout = {tasks.task("heldout", number).messages for number in range(40)}
    assert len(heldout) == 40
    for number in [*range(400), *range(10_000_000, 10_000_100)]:
        assert tasks.task("train", number).messages not in heldout


def test_seeds_are_apart() -> None:
    wide = {"min_terms": 5, "min_digits": 4}
    one, two = (GymConfig(seed=seed, parameters=wide).build() for seed in (0, 1))
    shared = {one.task("train", n).messages for n in range(50)} & {
        two.task("train", n).messages for n in range(50)
    }
    assert len(shared) <= 1  # Python mixes a seed's words so that 5 and 4 · 2³² + 5 are one generator


def test_a_number_beyond_the_heldout_tasks_is_refused() -> None:
    tasks = GymConfig(heldout=3).build()
    tasks.task("heldout", 2)
    with pytest.raises(ConfigError, match=r"tasks\.heldout = 3"):
        tasks.task("heldout", 3)


def test_too_few_questions_are_told() -> None:
    with pytest.raises(ConfigError, match="different questions"):
        GymConfig(parameters=SMALL, heldout=900).build().task("heldout", 0)


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "gcd", "dice", "word_sorting"])
def test_the_package_decides(name: str) -> None:
    tasks = GymConfig(dataset=name).build()
    for number in range(10):
        task = tasks.task("heldout", number)
        script = tasks.demonstrate(task, 0)
        (check,) = task.checks
        assert isinstance(check, ScoredBy) and script is not None
        assert GymScorer().score(check.arguments, script.answer) == 1.0
        assert GymScorer().score(check.arguments, f"x{script.answer}x") < 1.0


@given(st.text(max_size=60))
def test_any_answer_has_a_score(answer: str) -> None:
    (check,) = GymConfig().build().task("train", 5).checks
    assert isinstance(check, ScoredBy)
    assert 0.0 <= GymScorer().score(check.arguments, answer) <= 1.0


def test_what_an_agent_answers_is_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    attack = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    from reasoning_gym import create_dataset

    unsafe = create_dataset("puzzle24", seed=0, size=1)
    unsafe.score_answer(attack, unsafe[0])  # why there is a list: some scorers do
    offered = [name for name, why in data_sets().items() if not why]
    assert "puzzle24" not in offered and len(offered) > 40
    mark.unlink(missing_ok=True)
    for name in offered:
        made = create_dataset(name, seed=0, size=3)
        for answer in (attack, f"[{attack}]", f"({attack},)"):
            try:
                made.score_answer(answer, made[0])
            except Exception:  # noqa: BLE001  # the reward takes it for a wrong answer
                continue
    assert not mark.exists()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "n_queens"}, "evaluate the answer as Python"),
        ({"dataset": "bf"}, "terminal"),
        ({"parameters": {"terms": 3}}, "does not take them"),
        ({"parameters": {"min_terms": 0}}, "does not take them"),
        ({"parameters": {"seed": 3}}, "does not take them"),
        ({"parameters": {"min_terms": 2.5}}, r"min_terms = 2\.5 .*'chain_sum' does not take them"),
        ({"parameters": {"min_terms": "2"}}, "does not take them"),
        ({"parameters": {"min_terms": [2]}}, "does not take them"),
        ({"parameters": {"min_terms": datetime.date(1979, 5, 27)}}, r"1979-05-27 .*expected finite numbers"),
        ({"parameters": {"x": float("nan")}}, "expected finite numbers"),
        ({"parameters": {"x": [float("inf")]}}, "expected finite numbers"),
        ({"dataset": "ransom_note"}, "another one in another process"),
        ({"dataset": "isomorphic_strings"}, "order of sets"),
    ],
)
def test_what_is_wrong_is_told_at_once(config: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        GymConfig.model_validate(config).build()
    assert "\n" not in str(caught.value)


OFFERED = """
import hashlib, sys
from rollwright.tasks.config import GymConfig
from rollwright.tasks.gym import data_sets
for name in [name for name, why in data_sets().items() if not why]:
    tasks = GymConfig(dataset=name, heldout=1).build()
    made = [tasks._entry("train", number) for number in range(int(sys.argv[1]))]
    print(name, hashlib.blake2b(repr(made).encode()).hexdigest())
"""


def offered(seed: str, count: int) -> dict[str, str]:
    """Data set → digest of its first items, made with another hash seed."""
    done = subprocess.run(
        [sys.executable, "-c", OFFERED, str(count)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_every_offered_set_is_the_same_in_another_process(count: int) -> None:
    one, two = offered("1", count), offered("2", count)
    assert len(one) > 40 and [name for name in one if one[name] != two[name]] == []


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.dataset", None)
    data_sets.cache_clear()
    try:
        with pytest.raises(MissingExtra, match=r"rollwright\[reasoning-gym\]"):
            GymConfig(seed=77).build()
    finally:
        data_sets.cache_clear()


def test_a_score_to_reach_above_one_is_refused() -> None:
    with pytest.raises(ValidationError):
        GymConfig(at_least=1.5)
