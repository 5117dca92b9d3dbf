"""Intervals and rates for evaluations; numpy only.

Role: the arithmetic behind every "success 0.91 [0.88, 0.93]". Neighbours: reports and benchmarks call it.
Invariants: every interval holds its estimate; resampling is seeded, so a report repeats; what has no data
is an error, or an interval that says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Values = Sequence[float] | npt.NDArray[np.floating]
_CHUNK = 2**20
"""Numbers drawn at once in a bootstrap: 8 MB."""


class Interval(NamedTuple):
    """Bounds of a confidence interval."""

    low: float
    high: float


class Difference(NamedTuple):
    """A mean difference with the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def wilson(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate (Wilson 1927, JASA 22); right at 0 and 1 as well.

    Without trials it is 0 to 1: nothing is known.

    Raises:
        ValueError: successes outside 0 to `trials`.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: expected 0 to the number of trials")
    if trials == 0:
        return Interval(0.0, 1.0)
    z = _quantile(confidence)
    rate, share = successes / trials, z * z / trials
    centre = (rate + share / 2) / (1 + share)
    half = z / (1 + share) * math.sqrt(rate * (1 - rate) / trials + share / (4 * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(min(low, rate), max(high, rate))  # rounding may not push the rate out


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` tries succeeds: 1 − C(n−c, k) / C(n, k) (arXiv
    2107.03374).

    Raises:
        ValueError: fewer trials than `k`, or successes outside 0 to `trials`.
    """
    if not (1 <= k <= trials and 0 <= successes <= trials):
        raise ValueError(f"pass@{k} of {successes} successes in {trials} trials: expected 1 ≤ k ≤ trials")
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


def paired_difference(
    before: _Values,
    after: _Values,
    clusters: Sequence[object] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Difference:
    """Mean of `after − before` over pairs, with a percentile bootstrap interval (Efron & Tibshirani 1993,
    ch. 13).

    Pairs are measured on the same task; `clusters[i]` names what pair i shares with others (its task, its
    seed). Whole clusters are drawn with replacement, since pairs of one cluster are not independent;
    without `clusters` every pair stands alone.

    Raises:
        ValueError: no pairs, unequal lengths, values that are not finite, or fewer than two clusters.
    """
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    labels = range(len(difference)) if clusters is None else clusters
    if not len(before) == len(after) == len(labels):
        raise ValueError(f"{len(before)} before, {len(after)} after, {len(labels)} clusters: expected pairs")
    if not np.isfinite(difference).all():
        raise ValueError("a value is missing or infinite: leave out pairs that have no score")
    numbers: dict[object, int] = {}
    index = np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.intp)
    if len(numbers) < 2:
        raise ValueError(f"{len(numbers)} clusters: an interval needs at least two")
    sums = np.bincount(index, weights=difference).astype(np.float64)
    sizes = np.bincount(index).astype(np.float64)
    means = _resampled_means(sums, sizes, resamples, np.random.default_rng(seed))
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    estimate = float(difference.mean())
    return Difference(estimate, min(float(low), estimate), max(float(high), estimate))


def normalised_entropy(weights: _Values) -> float:
    """Shannon entropy of `weights` / Σ weights as a share of its largest value, log n: 0 (one choice) to 1
    (uniform).

    A single choice has entropy 0.

    Raises:
        ValueError: a negative or infinite weight, or none that is positive.
    """
    values = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all() and values.max(initial=0.0) > 0):
        raise ValueError("entropy needs finite weights ≥ 0, at least one of them positive")
    if len(values) == 1:
        return 0.0
    shares = values / values.max()  # before the sum, so that it cannot overflow
    shares = shares[shares > 0] / shares.sum()
    entropy = -float(np.sum(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))))
    return min(1.0, max(0.0, entropy / math.log(len(values))))


def _quantile(confidence: float) -> float:
    """z such that a standard normal lies within ±z with probability `confidence`."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence:g}: expected between 0 and 1, such as 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _resampled_means(
    sums: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.float64],
    resamples: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.float64]:
    """float64[resamples]: the mean over pairs when clusters are drawn with replacement."""
    count = len(sums)
    step = max(1, _CHUNK // count)
    means = []
    for first in range(0, resamples, step):
        drawn = rng.integers(0, count, (min(step, resamples - first), count))
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(means)
