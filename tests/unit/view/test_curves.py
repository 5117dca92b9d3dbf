"""Curves hold their intervals, leave out what has no value, and say why they are empty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.archive.base import Line
from rollwright.config import load
from rollwright.evals.statistics import wilson
from rollwright.view.curves import share, step_of
from rollwright.view.settings import settings


def line(group: str, value: float | None, versions: tuple[str, ...] = ("policy@0.3",)) -> Line:
    return Line(
        rollout="r",
        group=group,
        task="t",
        trace="",
        job="train",
        outcome="answered",
        value=value,
        turns=1,
        sampled=1,
        seconds=1.0,
        wall=0.0,
        versions=versions,
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1)), min_size=1, max_size=60))
def test_an_interval_holds_its_share(given: list[tuple[int, float]]) -> None:
    lines = [line(str(group), value) for group, value in given]
    rate, low, high = share(lines, 0.5)
    assert rate == pytest.approx(sum(value >= 0.5 for _, value in given) / len(given))
    assert 0 <= low <= rate <= high <= 1 and low < high


def test_siblings_that_agree_count_once_and_strangers_each() -> None:
    alike = [line(str(group), float(group % 2)) for group in range(20) for _ in range(8)]
    apart = [line(str(group), float(member % 2)) for group in range(20) for member in range(8)]
    _, low, high = share(alike, 1.0)
    assert (low, high) == pytest.approx(wilson(10, 20), abs=0.01)
    _, low, high = share(apart, 1.0)
    assert (low, high) == pytest.approx(wilson(80, 160), abs=0.01)


def test_a_rollout_counts_for_its_oldest_policy() -> None:
    assert step_of(line("g", 1.0, ("policy@1.12", "policy@0.9"))) == 9
    assert step_of(line("g", 1.0, ())) is None


def test_infinite_rewards_are_no_points() -> None:
    from rollwright.view.curves import _binned

    lines = [line("g", value) for value in (1.0, math.inf, None)]
    assert [len(held) for held in _binned(lines).values()] == [1]


def test_what_was_changed_comes_first() -> None:
    config = load([], ["loop.steps=3", "warmstart.schedule.warmup=7", "tasks.hops=2", "algorithm.type=rloo"])
    found = settings(config)
    changed = [setting.key for setting in found if setting.changed]
    assert changed == [setting.key for setting in found[: len(changed)]]
    assert {"loop.steps", "warmstart.schedule.warmup", "tasks.hops"} <= set(changed)
    assert not {"seed", "warmstart.schedule.final", "tasks.people"} & set(changed)
    steps = next(setting for setting in found if setting.key == "loop.steps")
    assert (steps.value, steps.default) == ("3", "40") and "Optimiser steps" in steps.help
