"""Group-relative advantages: numbers by hand, and invariants for any rewards."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.algo.credit import centred
from rollwright.algo.grpo import Grpo
from rollwright.algo.rloo import Rloo
from rollwright.testing.algorithms import by_rollout, check_rows
from rollwright.testing.records import make_group, make_row
from rollwright.types import Outcome, Sample

rewards = st.lists(st.one_of(st.none(), st.floats()), max_size=9)
ordinary = st.floats(-100, 100)
outcomes = st.sampled_from(Outcome)
ALGORITHMS = [
    Grpo(),
    Grpo(scale="std"),
    Grpo(aggregation="sequence", bound=0.5),
    Rloo(),
    Rloo(aggregation="token"),
]


def advantages(samples: list[Sample]) -> list[float]:
    """The one advantage that each sample has on its sampled tokens."""
    found = []
    for sample in samples:
        (value,) = set(sample.advantages[sample.row.sampled].tolist())
        found.append(value)
    return found


def test_a_masked_row_does_not_vote() -> None:
    valid = [Outcome.ANSWERED] * 3 + [Outcome.ROLLOUT_TIMEOUT]
    group = make_group([1, 3, 2, 0], outcomes=valid)
    samples = Grpo().samples(group)
    assert [s.rollout for s in samples] == ["g0/0", "g0/1", "g0/2"]
    assert advantages(samples) == [-1, 1, 0]


def test_a_wrong_answer_votes_and_an_infrastructure_failure_does_not() -> None:
    wrong = make_group([1, 0, 0], outcomes=[Outcome.ANSWERED, Outcome.ANSWERED, Outcome.MAX_TURNS])
    lost = make_group([1, 0, 0], outcomes=[Outcome.ANSWERED, Outcome.ANSWERED, Outcome.SANDBOX_LOST])
    assert advantages(Grpo().samples(wrong)) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert advantages(Grpo().samples(lost)) == [0.5, -0.5]


def test_leave_one_out_by_hand() -> None:
    assert advantages(Rloo().samples(make_group([1, 0, 0, 0]))) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_standardising_a_singleton_success_stays_small() -> None:
    scaled = advantages(Grpo(scale="std").samples(make_group([1, 0, 0, 0])))
    assert scaled == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_the_bound_cuts_both_ends() -> None:
    assert advantages(Grpo(bound=10).samples(make_group([100, -100, 0]))) == [10, -10, 0]


def test_rounding_is_no_variance() -> None:
    assert 0.1 + 0.2 != 0.3
    assert Grpo(scale="std").samples(make_group([0.1 + 0.2, 0.3, 0.3])) == []


@pytest.mark.parametrize("given_rewards", [[], [1.0], [None, 2.0], [0.5] * 8, [math.nan, 1.0, None]])
def test_no_samples_without_variance(given_rewards: list[float | None]) -> None:
    for algorithm in ALGORITHMS:
        assert algorithm.samples(make_group(given_rewards)) == []


def test_a_rollout_that_sampled_nothing_votes_but_has_no_sample() -> None:
    rows = [[make_row("PPSS")], [make_row("PPTT")], []]
    samples = Grpo().samples(make_group([1.0, 0.0, 0.5], rows=rows))
    assert [s.rollout for s in samples] == ["g0/0"]
    assert advantages(samples) == [0.5]


def test_token_weights_are_one_and_sequence_weights_sum_to_one() -> None:
    rows = [[make_row("PPSSTS"), make_row("PSSSSSI")], [make_row("PS")]]
    group = make_group([1.0, 0.0], rows=rows)
    token, sequence = Grpo().samples(group), Grpo(aggregation="sequence").samples(group)
    assert token[0].weights.tolist() == [0, 0, 1, 1, 0, 1]
    assert token[1].weights.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert sum(float(s.weights.sum()) for s in sequence[:2]) == pytest.approx(1)
    assert sequence[2].weights.tolist() == [0, 1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(rewards=rewards, data=st.data())
@settings(max_examples=80, deadline=None)
def test_finite_and_bounded_for_any_rewards(
    algorithm: Grpo | Rloo, rewards: list[float | None], data: st.DataObject
) -> None:
    ends = data.draw(st.lists(outcomes, min_size=len(rewards), max_size=len(rewards)))
    group = make_group(rewards, outcomes=ends)
    samples = algorithm.samples(group)
    check_rows(group, samples)
    assert all(abs(value) <= algorithm.bound for value in advantages(samples))
    scorable = {
        f"g0/{i}"
        for i, (reward, end) in enumerate(zip(rewards, ends, strict=True))
        if end.scorable and reward is not None and math.isfinite(reward)
    }
    assert {s.rollout for s in samples} in (scorable, set())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(values=st.lists(ordinary, min_size=2, max_size=8), other=st.floats(), at=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_an_excluded_member_changes_nothing(
    algorithm: Grpo | Rloo, values: list[float], other: float, at: int
) -> None:
    place = min(at, len(values))
    rows = [[make_row(seed=i)] for i in range(len(values))]
    alone = algorithm.samples(make_group(values, rows=rows))
    beside = algorithm.samples(
        make_group(
            [*values[:place], other, *values[place:]],
            rows=[*rows[:place], [make_row(seed=99)], *rows[place:]],
            outcomes=[Outcome.ERROR if i == place else Outcome.ANSWERED for i in range(len(values) + 1)],
        )
    )
    assert list(by_rollout(alone).values()) == list(by_rollout(beside).values())


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_cutting_a_rollout_keeps_its_weight(lengths: list[int]) -> None:
    rows = [[make_row("PP" + "S" * n + "T") for n in lengths], [make_row("PSS")]]
    for aggregation, expected in (("token", float(sum(lengths))), ("sequence", 1.0)):
        samples = Grpo(aggregation=aggregation).samples(make_group([1.0, 0.0], rows=rows))
        total = sum(float(s.weights.sum()) for s in samples if s.rollout == "g0/0")
        assert total == pytest.approx(expected if sum(lengths) else 0.0, rel=1e-5)


@given(st.lists(ordinary, min_size=2, max_size=9), st.floats(-50, 50))
def test_centred_rewards_sum_to_nothing_and_ignore_a_shift(values: list[float], shift: float) -> None:
    found = centred(values)
    assert abs(found.sum()) <= 1e-9 * max(1.0, np.abs(values).max())
    assert np.allclose(centred(np.array(values) + shift), found, atol=1e-6)
