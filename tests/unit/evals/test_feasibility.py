"""The arithmetic of a feasibility report: bounds for any tries, and the verdicts where they are known."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.evals.feasibility import (
    Feasibility,
    Figure,
    Plan,
    Trial,
    critic,
    explained,
    feasibility,
    mean,
    transfer,
)
from rollwright.evals.feasibility_text import lines

PLAN = Plan(group_size=8, groups=16, steps=10, overlap=False, sampling_seconds=100.0, training_seconds=2.0)


def trial(value: float | None, turns: int = 2, states: tuple[str, ...] = ()) -> Trial:
    return Trial(value=value, tokens=10, turns=turns, seconds=1.0, states=states)


def groups_of(*wins: int, tries: int = 8) -> list[list[Trial]]:
    return [[trial(float(i < won)) for i in range(tries)] for won in wins]


values = st.none() | st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
trials = st.builds(
    Trial,
    value=values,
    tokens=st.integers(0, 500),
    turns=st.integers(0, 9),
    seconds=st.floats(0, 100),
    states=st.lists(st.sampled_from("ab"), max_size=8).map(tuple),
)
tries = st.integers(2, 6).flatmap(
    lambda k: st.lists(st.lists(trials, min_size=k, max_size=k), min_size=1, max_size=8)
)


def figures(found: Feasibility) -> list[Figure]:
    own = [getattr(found, field.name) for field in dataclasses.fields(found)]
    return [each for each in own if isinstance(each, Figure)] + list(found.shares.values())


@settings(max_examples=40, deadline=None)
@given(tries, st.none() | st.floats(0.01, 100), st.booleans())
def test_for_any_tries_the_figures_are_finite_and_hold_their_estimates(
    groups: list[list[Trial]], training: float | None, overlap: bool
) -> None:
    plan = dataclasses.replace(PLAN, training_seconds=training, overlap=overlap)
    found = feasibility(groups, plan)
    for figure in figures(found):
        told = [each for each in (figure.low, figure.value, figure.high) if each is not None]
        assert all(map(math.isfinite, told))
        assert all(a <= b + 1e-9 for a, b in pairwise(told))
        assert figure.value is not None or (figure.low, figure.high) == (None, None)
    assert sum(share.value or 0.0 for share in found.shares.values()) == pytest.approx(1)
    if found.pass_k.value is not None and found.unscorable == 0:
        assert found.pass_k.value >= (found.pass_1.value or 0.0) - 1e-9
    assert found.verdict in ("go", "no room", "no signal") and all(found.reasons)
    assert json.loads(json.dumps(dataclasses.asdict(found), allow_nan=False))
    assert found.reasons[0] in "\n".join(lines(found))


@settings(max_examples=30, deadline=None)
@given(tries, st.randoms(use_true_random=False))
def test_the_order_of_tries_and_tasks_changes_no_estimate(
    groups: list[list[Trial]], order: random.Random
) -> None:
    mixed = [order.sample(group, len(group)) for group in order.sample(groups, len(groups))]
    one, two = feasibility(groups, PLAN), feasibility(mixed, PLAN)
    assert one.verdict == two.verdict
    for a, b in zip(figures(one), figures(two), strict=True):
        assert (a.value is None) == (b.value is None)
        assert a.value is None or a.value == pytest.approx(b.value, abs=1e-6)


@pytest.mark.parametrize(
    ("wins", "verdict", "told"),
    [
        ([4] * 32, "go", "a step of 16 groups tries 16 tasks"),
        ([4] * 8 + [0] * 24, "go", "a step of 16 groups tries 64 tasks"),
        ([8] * 64, "no room", "harder tasks"),
        ([8] * 62 + [7] * 2, "no room", "harder tasks"),
        ([0] * 64, "no signal", "64 of 64 groups are all wrong"),
        ([0] * 63 + [1], "no signal", "demonstrations"),
        ([8] * 40 + [0] * 24, "no room", "sampling again finds nothing"),
        ([8] * 24 + [0] * 40, "no signal", "all wrong"),
    ],
)
def test_verdicts(wins: list[int], verdict: str, told: str) -> None:
    found = feasibility(groups_of(*wins), PLAN)
    assert found.verdict == verdict
    assert told in "; ".join(found.reasons)


def test_nothing_scorable_is_no_signal_and_no_data() -> None:
    found = feasibility([[trial(None)] * 4] * 3, PLAN)
    assert (found.verdict, found.unscorable, found.pass_1) == ("no signal", 12, Figure())
    assert found.step_seconds == Figure() and found.success_seconds is None
    assert any(line.startswith("pass@1") and "no data" in line for line in lines(found))


def test_no_tries_are_refused() -> None:
    with pytest.raises(ValueError, match="no tries"):
        feasibility([[]], PLAN)


def test_the_figures_of_a_case_by_hand() -> None:
    found = feasibility(groups_of(4, 4, 0, 8), PLAN)  # 32 tries took 100 s
    assert found.pass_1.value == pytest.approx(0.5)
    assert found.pass_k.value == pytest.approx(0.75)
    assert found.shares["signal"].value == pytest.approx(0.5)
    assert found.variance.value == pytest.approx((2 / 7 + 2 / 7) / 4)
    assert found.success_tokens == 320 / 16 and found.success_seconds == 100 / 16
    # a step samples 16 groups / 0.5 = 32 groups = 256 rollouts of 100 / 32 s, then trains 2 s
    assert found.step_seconds.value == pytest.approx(256 * 100 / 32 + 2)
    assert found.run_seconds.value == pytest.approx(10 * (800 + 2))
    overlapped = feasibility(groups_of(4, 4, 0, 8), dataclasses.replace(PLAN, overlap=True))
    assert overlapped.step_seconds.value == pytest.approx(800)


def test_an_interval_of_equal_rates_is_not_a_point() -> None:
    assert mean([1.0] * 20, rate=True).low == pytest.approx(0.839, abs=0.01)  # Wilson, 20 of 20
    assert mean([0.0] * 20, rate=True).high == pytest.approx(0.161, abs=0.01)


def long_groups(decided: bool, count: int = 40) -> list[list[Trial]]:
    """Six-turn rollouts in one of two states after turn 3; the state decides the reward, or chance does."""
    dice = random.Random(0)
    groups = []
    for _ in range(count):
        group = []
        for _ in range(8):
            good = dice.random() < 0.5
            won = good if decided else dice.random() < 0.5
            group.append(trial(float(won), turns=6, states=("s", "s", *("g" if good else "b") * 3)))
        groups.append(group)
    return groups


def test_a_critic_pays_where_long_rollouts_are_decided_half_way() -> None:
    assert explained(long_groups(decided=True), 3) == 1.0
    assert critic(long_groups(decided=True)).pays is True
    assert explained(long_groups(decided=True), 1) == pytest.approx(0.0, abs=0.01)


def test_chance_explains_nothing() -> None:
    assert (explained(long_groups(decided=False), 3) or 0.0) < 0.05
    assert critic(long_groups(decided=False)).pays is False


def test_states_of_one_rollout_each_say_nothing() -> None:
    groups = [[trial(float(i % 2), turns=6, states=(str(i),) * 5) for i in range(8)] for _ in range(20)]
    assert explained(groups, 3) is None
    assert critic(groups).pays is None


def test_short_rollouts_need_no_critic() -> None:
    groups = [[trial(float(i % 2), turns=2, states=(str(i % 2),)) for i in range(8)] for _ in range(20)]
    found = critic(groups)
    assert (found.pays, found.explained) == (False, 1.0)


def test_train_tasks_that_are_solved_and_held_out_ones_that_are_not_are_told() -> None:
    found = feasibility(groups_of(*[6, 8] * 20), PLAN)
    poor = transfer(found, groups_of(*[0, 0, 0, 1] * 10, tries=2))
    assert poor.heldout.value == 0.125 and poor.verdict == found.verdict
    assert poor.warnings[0].startswith("train tasks are solved at 88%, held-out ones at 12%")
    told = list(lines(poor))
    assert any(line.startswith("held-out pass@1") for line in told) and any(
        "warning: train" in t for t in told
    )
    assert transfer(found, groups_of(*[2, 1] * 20, tries=2)).warnings == ()  # as good
    assert transfer(found, groups_of(1, tries=2)).warnings == ()  # one task says little
    assert transfer(found, []).heldout == Figure()


def test_evidence_stands_beside_a_bad_verdict_only() -> None:
    seen = ("rollouts ended: answered 100 %",)
    bad = dataclasses.replace(feasibility(groups_of(0, 0), PLAN), evidence=seen)
    good = dataclasses.replace(feasibility(groups_of(3, 4), PLAN), evidence=seen)
    assert seen[0] in list(lines(bad)) and seen[0] not in list(lines(good))
