"""Tokens come from the distribution asked for, and the logprob says how likely they really were."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollwright.engine.embedded.sampler import noise_key, sample, uniforms

N = 20_000
LOGITS = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2], np.float32)


def draw(
    logits: np.ndarray, temperature: float, top_p: float, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    n = len(noise)
    rows = torch.from_numpy(np.tile(logits, (n, 1)))
    return sample(rows, np.full(n, temperature, np.float32), np.full(n, top_p, np.float32), noise)


def target(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """The distribution to draw from, in float64: the smallest most likely set whose mass reaches top_p."""
    p = np.exp(logits.astype(np.float64) / temperature - (logits / temperature).max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[np.cumsum(p[order]) - p[order] < top_p]
    nucleus = np.zeros_like(p)
    nucleus[kept] = p[kept] / p[kept].sum()
    return nucleus


def keyed_noise(n: int = N) -> np.ndarray:
    keys = np.array([noise_key(0, f"request-{i % 100}") for i in range(n)], np.uint64)
    return uniforms(keys, np.arange(n) // 100)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.8), (0.7, 0.5)]
)
def test_the_distribution_is_right(temperature: float, top_p: float) -> None:
    ids, logprobs = draw(LOGITS, temperature, top_p, keyed_noise())
    p = target(LOGITS, temperature, top_p)
    counts = np.bincount(ids, minlength=len(p))
    assert counts[p == 0].sum() == 0, "drawn outside the nucleus"
    kept = p > 0
    chi2 = ((counts[kept] - N * p[kept]) ** 2 / (N * p[kept])).sum()
    freedom = kept.sum() - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5, f"chi² {chi2:.1f} at {freedom} degrees of freedom"
    assert np.abs(logprobs - np.log(p[ids])).max() < 1e-5


@given(
    logits=hnp.arrays(np.float32, st.integers(2, 9), elements=st.floats(-12, 12, width=32)),
    temperature=st.floats(0.25, 4.0, width=32),
    top_p=st.floats(0.0625, 1.0, width=32),
    noise=st.one_of(st.floats(0, 1, exclude_max=True, width=32), st.sampled_from([0.0, 1 - 2**-24])),
)
def test_the_logprob_is_that_of_the_renormalised_distribution(
    logits: np.ndarray, temperature: float, top_p: float, noise: float
) -> None:
    (id,), (logprob,) = draw(logits, temperature, top_p, np.array([noise], np.float32))
    # at a tie, with the edge of the nucleus or between tokens, float32 may decide otherwise: either is right
    options = [target(logits, temperature, float(np.clip(top_p + d, 1e-6, 1))) for d in (-1e-5, 0.0, 1e-5)]
    tied = np.flatnonzero(np.abs(logits - logits[id]) < 1e-5)
    assert any(p[j] > 0 and abs(logprob - np.log(p[j])) < 1e-3 for p in options for j in tied)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1 - 2**-24])
def test_what_is_impossible_is_never_drawn(noise: float) -> None:
    logits = np.array([-np.inf, -200.0, 0.0, 0.1, -200.0, -np.inf], np.float32)
    ids, logprobs = draw(logits, 1.0, 1.0, np.array([noise], np.float32))
    assert ids[0] in (2, 3) and np.isfinite(logprobs[0])


def test_greedy_takes_the_most_likely_with_its_logprob_at_temperature_1() -> None:
    ids, logprobs = draw(LOGITS, 0.0, 0.3, keyed_noise(50))
    assert set(ids.tolist()) == {int(LOGITS.argmax())}
    assert np.allclose(logprobs, np.log(target(LOGITS, 1.0, 1.0).max()), atol=1e-6)


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(40, 12)).astype(np.float32))
    temperature = rng.choice(np.array([0, 0.5, 1, 1.5], np.float32), 40)
    top_p, noise = rng.choice(np.array([0.5, 1], np.float32), 40), keyed_noise(40)
    ids, logprobs = sample(logits, temperature, top_p, noise)
    for i in range(40):
        one = slice(i, i + 1)
        id, logprob = sample(logits[one], temperature[one], top_p[one], noise[one])
        assert id[0] == ids[i] and abs(logprob[0] - logprobs[i]) < 1e-6


def test_noise_belongs_to_seed_request_and_position() -> None:
    keys = [noise_key(seed, name) for seed in range(3) for name in ("a", "b", "1/a")] + [noise_key(11, "a")]
    assert len(set(keys)) == len(keys)
    table = np.array([uniforms(np.full(500, key, np.uint64), np.arange(500)) for key in keys])
    assert (table >= 0).all() and (table < 1).all()
    again = uniforms(np.array([keys[4]], np.uint64), np.array([321]))
    assert again[0] == table[4, 321]
    correlation = np.corrcoef(np.concatenate([table, table[:, ::-1]])) - np.eye(2 * len(keys))
    assert np.abs(correlation).max() < 0.25, "noise of two requests goes together"
    assert abs(table.mean() - 0.5) < 0.02 and abs(table.var() - 1 / 12) < 0.005
