"""Statistics against values worked out by hand, and properties that must hold for any data."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.evals.statistics import normalised_entropy, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z = 1.959964; 0 of n: high = z²/(n+z²); n of n: low = n/(n+z²)
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        # 5 of 10: 0.5 ± z/(1+z²/10)·√(0.025+z²/400) = 0.5 ± 1.959964/1.3841459·0.186006
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17, table I
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_by_hand(successes: int, trials: int, low: float, high: float) -> None:
    found = wilson(successes, trials)
    assert (found.low, found.high) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_its_rate_and_mirrors(case: tuple[int, int]) -> None:
    successes, trials = case
    found, mirror = wilson(successes, trials), wilson(trials - successes, trials)
    assert 0 <= found.low <= successes / trials <= found.high <= 1 and found.low < found.high
    assert found.low == pytest.approx(1 - mirror.high) and found.high == pytest.approx(1 - mirror.low)
    wider, more = wilson(successes, trials, 0.99), wilson(4 * successes, 4 * trials)
    assert wider.low <= found.low and found.high <= wider.high
    assert more.high - more.low < found.high - found.low


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_cannot_be(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to the number"):
        wilson(successes, trials)
    with pytest.raises(ValueError, match="confidence"):
        wilson(1, 2, 1.0)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_average_over_all_choices(case: tuple[int, int, int]) -> None:
    trials, successes, k = case
    tries = [1] * successes + [0] * (trials - successes)
    choices = list(itertools.combinations(tries, k))
    assert pass_at_k(trials, successes, k) == pytest.approx(sum(map(max, choices)) / len(choices))


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)  # no overflow
    for wrong in ((3, 1, 4), (3, 4, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="expected 1 ≤ k"):
            pass_at_k(*wrong)


def test_difference_by_hand() -> None:
    """Two clusters of one pair, +1 and 0: a resample's mean is 0, ½ or 1 with chance ¼, ½, ¼."""
    found = paired_difference([0, 0], [1, 0], confidence=0.4)
    assert (found.estimate, found.low, found.high) == (0.5, 0.5, 0.5)
    found = paired_difference([0, 0], [1, 0], confidence=0.9)
    assert (found.estimate, found.low, found.high) == (0.5, 0.0, 1.0)


PAIRS = st.lists(
    st.tuples(st.floats(-10, 10), st.floats(-10, 10), st.integers(0, 4)), min_size=2, max_size=30
).filter(lambda pairs: len({cluster for _, _, cluster in pairs}) > 1)


@settings(max_examples=50, deadline=None)
@given(PAIRS, st.integers(0, 9))
def test_difference_properties(pairs: list[tuple[float, float, int]], seed: int) -> None:
    before, after, clusters = map(list, zip(*pairs, strict=True))
    found = paired_difference(before, after, clusters, resamples=200, seed=seed)
    assert found == paired_difference(before, after, clusters, resamples=200, seed=seed)
    assert found.low <= found.estimate <= found.high
    assert found.estimate == pytest.approx(np.mean(np.subtract(after, before)))
    swapped = paired_difference(after, before, clusters, resamples=200, seed=seed)
    assert (swapped.low, swapped.high) == (pytest.approx(-found.high), pytest.approx(-found.low))
    per_cluster = [np.mean([a - b for b, a, c in pairs if c == k]) for k in set(clusters)]
    assert min(per_cluster) - 1e-9 <= found.low and found.high <= max(per_cluster) + 1e-9


def test_clusters_widen_and_the_interval_covers() -> None:
    """200 studies of 20 clusters × 10 copies of one draw: by cluster ≈ 95 % cover the truth, ignoring them
    far fewer."""
    rng = np.random.default_rng(3)
    covered = {True: 0, False: 0}
    for study in range(200):
        after = np.repeat(rng.normal(1.0, 1.0, 20), 10)
        labels = np.repeat(np.arange(20), 10).tolist()
        for clustered in (True, False):
            groups = labels if clustered else None
            found = paired_difference(np.zeros(200), after, groups, resamples=300, seed=study)
            covered[clustered] += found.low <= 1.0 <= found.high
    assert covered[True] >= 176 and covered[False] < 120


def test_difference_needs_data() -> None:
    for before, after, clusters in (
        *(([], [], None), ([1.0], [2.0], None), ([1.0, 2.0], [1.0, 2.0], ["a", "a"])),
        *(([1.0, math.nan], [1.0, 1.0], None), ([1.0, 2.0], [1.0, 2.0], ["a"])),
    ):
        with pytest.raises(ValueError):
            paired_difference(before, after, clusters)
    with pytest.raises(ValueError):
        paired_difference([1.0, 2.0], [1.0])


def test_entropy_by_hand() -> None:
    assert normalised_entropy([1, 1, 1, 1]) == 1.0
    assert normalised_entropy([0, 7, 0]) == 0.0 == normalised_entropy([3])
    assert normalised_entropy([3, 1]) == pytest.approx(0.8112781244591328)  # H(¼) in bits
    assert normalised_entropy([1, 1, 0, 0]) == pytest.approx(0.5)
    for wrong in ([], [0, 0], [-1, 2], [math.nan, 1], [math.inf, 1]):
        with pytest.raises(ValueError, match="finite weights"):
            normalised_entropy(wrong)


WEIGHTS = st.just(0.0) | st.floats(1e-300, 1e300)  # a scale must not make 0 of one


@given(st.lists(WEIGHTS, min_size=1, max_size=20).filter(any), st.floats(1e-3, 1e3))
def test_entropy_is_a_share_whatever_the_scale_or_order(weights: list[float], scale: float) -> None:
    found = normalised_entropy(weights)
    assert 0 <= found <= 1
    assert normalised_entropy([w * scale for w in reversed(weights)]) == pytest.approx(found, abs=1e-9)
