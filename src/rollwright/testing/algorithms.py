"""What every algorithm must do, as checks over a `make` callable.

Role: the conformance suite of `algo.base.Algorithm`. Neighbours: `tests/contract` runs it over our
algorithms, a plug-in's tests over theirs. Invariant: only what the contract says is asked: excluded members
change nothing, advantages are finite, weights lie on sampled tokens only and don't depend on how a rollout
is cut into rows.

Use: `@pytest.mark.parametrize("check", CHECKS)`, then `check(make)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rollwright.algo.base import Algorithm
from rollwright.testing.records import make_group, make_row
from rollwright.types import Group, Outcome, Row, Sample

Make = Callable[[], Algorithm]

NAN = math.nan
BOUND = 1e6
"""No advantage may be larger, whatever the rewards."""

HARD: tuple[tuple[float | None, ...], ...] = (
    (),
    (1.0,),
    (None, None),
    (1.0, None),
    (NAN, NAN, 1.0),
    (0.0, 0.0, 0.0),
    (0.3, 0.1 + 0.2, 0.3),
    (1.0, 0.0, 0.0, 0.0),
    (math.inf, 1.0, 0.0),
    (-math.inf, math.inf),
    (1e308, -1e308, 1e308),
    (5e-324, 0.0),
    (NAN, None, 1e-9, -1e9),
)
"""Rewards that broke somebody's baseline."""


def by_rollout(samples: Sequence[Sample]) -> dict[str, list[tuple[bytes, bytes]]]:
    """Advantages and weights of each rollout, as bytes."""
    found: dict[str, list[tuple[bytes, bytes]]] = {}
    for sample in samples:
        found.setdefault(sample.rollout, []).append((sample.advantages.tobytes(), sample.weights.tobytes()))
    return found


def check_rows(group: Group, samples: Sequence[Sample]) -> None:
    """Each sample is a row of its rollout, whole, with sound numbers on its sampled tokens and 0
    elsewhere."""
    rows = {id(row): m.rollout.identity.rollout for m in group.members for row in m.rollout.rows}
    assert len({id(sample.row) for sample in samples}) == len(samples)
    for sample in samples:
        assert rows[id(sample.row)] == sample.rollout
        assert sample.group == group.id
        for values in (sample.advantages, sample.weights):
            assert values.dtype == np.float32
            assert values.shape == sample.row.tokens.shape
            assert np.isfinite(values).all()
        assert np.abs(sample.advantages).max() <= BOUND
        assert (sample.weights >= 0).all()
        assert not sample.weights[~sample.row.sampled].any()


def check_better_is_encouraged(make: Make) -> None:
    """Over its rollout a better reward never gets the smaller advantage, and signs differ within the
    group."""
    group = make_group([0.0, 1.0, 0.5, 0.0])
    samples = make().samples(group)
    check_rows(group, samples)
    sums = {sample.rollout: float((sample.advantages * sample.weights).sum()) for sample in samples}
    assert sums["g0/0"] < 0 < sums["g0/1"]
    assert sums["g0/3"] <= sums["g0/2"] <= sums["g0/1"]


def check_any_rewards(make: Make) -> None:
    """Missing, infinite, huge, tiny and equal rewards give sound numbers or nothing."""
    for rewards in HARD:
        group = make_group(rewards)
        check_rows(group, make().samples(group))


def check_no_signal_is_empty(make: Make) -> None:
    """Without two different rewards there is nothing to learn."""
    rewards: tuple[Sequence[float | None], ...] = (
        (),
        (1.0,),
        (1.0, 1.0),
        (None, None),
        (1.0, None),
        (NAN, 0.0),
    )
    for given in rewards:
        assert make().samples(make_group(given)) == []


def check_excluded_changes_nothing(make: Make) -> None:
    """An unscorable member, or one that the infrastructure ended, neither votes nor trains, whatever its
    reward."""
    alone = by_rollout(make().samples(make_group([1.0, 3.0, 2.0])))
    assert len(alone) == 3
    for reward in (None, NAN, math.inf):
        assert by_rollout(make().samples(make_group([1.0, 3.0, 2.0, reward]))) == alone
    for outcome in Outcome:
        if not outcome.scorable:
            outcomes = [Outcome.ANSWERED] * 3 + [outcome]
            for reward in (0.0, 100.0):
                group = make_group([1.0, 3.0, 2.0, reward], outcomes=outcomes)
                assert by_rollout(make().samples(group)) == alone


def check_order_is_nothing(make: Make) -> None:
    """What a rollout gets depends on its reward and its siblings', not on its place."""
    rewards = [0.25, 1.0, 0.0, 0.5]
    one = make().samples(make_group(rewards))
    other = make().samples(make_group(rewards[::-1]))
    for sample in one:
        twin = next(s for s in other if s.rollout == f"g0/{3 - int(sample.rollout[-1])}")
        assert np.allclose(sample.advantages, twin.advantages, atol=1e-6)
        assert np.allclose(sample.weights, twin.weights)


def check_cutting_keeps_weight(make: Make) -> None:
    """A rollout cut into rows keeps its advantage and its total weight, and so do its siblings."""
    whole = make_row("PPSSSSSSTTSSSS")
    sibling = make_row("PPSS", seed=1)
    cuts: list[list[Row]] = [
        [whole],
        [make_row("PPSSSSSS"), make_row("PPPPPPPPTTSSSS")],
        [make_row("PSS"), make_row("PPPSSSSTTPPPP"), make_row("PSSSS")],
    ]
    totals = []
    for cut in cuts:
        group = make_group([1.0, 0.0], rows=[cut, [sibling]])
        samples = make().samples(group)
        check_rows(group, samples)
        totals.append(
            [
                sum(float(sample.weights.sum()) for sample in samples if sample.rollout == rollout)
                for rollout in ("g0/0", "g0/1")
            ]
        )
    assert np.allclose(totals, totals[0], rtol=1e-5)


def check_pure(make: Make) -> None:
    """The same group gives the same samples, whatever came between."""
    algorithm, group = make(), make_group([1.0, 0.0, 0.5])
    first = by_rollout(algorithm.samples(group))
    algorithm.samples(make_group([9.0, -9.0]))
    assert by_rollout(algorithm.samples(group)) == first == by_rollout(make().samples(group))


CHECKS: tuple[Callable[[Make], None], ...] = (
    check_better_is_encouraged,
    check_any_rewards,
    check_no_signal_is_empty,
    check_excluded_changes_nothing,
    check_order_is_nothing,
    check_cutting_keeps_weight,
    check_pure,
)
