"""Tokens come from the distribution asked for, and the logprob says how likely they really were."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollwright.engine.embedded import sampler
from rollwright.engine.embedded.sampler import Allowed, Narrowing, draw, noise_key, uniforms
from rollwright.errors import EngineError

N = 20_000
LOGITS = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2], np.float32)
EDGES = [0.0, 1 - 2**-24]


def narrowing(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Narrowing:
    """The same for n rows."""
    return Narrowing(
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int64),
        np.full(n, top_p, np.float32),
        np.full(n, min_p, np.float32),
    )


def bits(allowed: np.ndarray) -> np.ndarray:
    """uint32[m, words] of bool[m, V]."""
    wide = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), bool)
    wide[:, : allowed.shape[1]] = allowed
    return np.packbits(wide, axis=1, bitorder="little").view(np.uint32)


def target(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The distribution to draw from, one step after the other in float64, as the contract says it."""
    x = logits.astype(np.float64)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        p[order[np.cumsum(p[order]) - p[order] >= top_p]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def keyed_noise(n: int = N) -> np.ndarray:
    keys = np.array([noise_key(0, f"request-{i % 100}") for i in range(n)], np.uint64)
    return uniforms(keys, np.arange(n) // 100)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_p": 0.8},
        {"temperature": 0.7, "top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.15},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "allowed": np.arange(8) % 2 == 0},
    ],
    ids=str,
)
def test_the_distribution_is_right(how: dict[str, float]) -> None:
    only = how.get("allowed")
    allowed = None if only is None else Allowed(np.arange(N), bits(np.tile(only, (N, 1))))
    rows = torch.from_numpy(np.tile(LOGITS, (N, 1)))
    plain = {name: value for name, value in how.items() if name != "allowed"}
    ids, logprobs = draw(rows, narrowing(N, **plain), keyed_noise(), allowed)
    p = target(LOGITS, **how)
    counts = np.bincount(ids, minlength=len(p))
    assert counts[p == 0].sum() == 0, "drawn outside what is left"
    kept = p > 0
    chi2 = ((counts[kept] - N * p[kept]) ** 2 / (N * p[kept])).sum()
    freedom = kept.sum() - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5, f"chi² {chi2:.1f} at {freedom} degrees of freedom"
    assert np.abs(logprobs - np.log(p[ids])).max() < 1e-5


def test_a_large_vocabulary_is_drawn_from_in_proportion() -> None:
    """Found by block first: mass in the first, in the last (cut short) and on both sides of a border."""
    n, size = 2000, sampler.WHOLE + 7
    logits = torch.full((n, size), -100.0)
    places = np.array([0, 63, 64, 5000, 5001, size - 8, size - 7, size - 1])
    logits[:, places] = torch.from_numpy(LOGITS)
    ids, logprobs = draw(logits, narrowing(n), keyed_noise(n))
    p = target(LOGITS)
    found = np.searchsorted(places, ids)
    assert (places[found] == ids).all(), "drawn where there is no mass"
    counts = np.bincount(found, minlength=8)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 7 + 5 * np.sqrt(14) + 5
    assert np.abs(logprobs - np.log(p[found])).max() < 1e-5


@st.composite
def rows_and_settings(draws: st.DrawFn) -> tuple[np.ndarray, dict[str, float], np.ndarray | None]:
    size = draws(st.integers(2, 70))
    # few different values: ties are common in low precision
    values = st.one_of(st.floats(-12, 12, width=32), st.sampled_from([0.0, 1.0, -np.inf]))
    logits = draws(hnp.arrays(np.float32, size, elements=values))
    how = {
        "temperature": draws(st.one_of(st.just(1.0), st.floats(0.25, 4.0, width=32))),
        "top_k": draws(st.integers(0, size + 2)),
        "top_p": draws(st.one_of(st.just(1.0), st.floats(0.0625, 1.0, width=32))),
        "min_p": draws(st.one_of(st.just(0.0), st.floats(0, 1, width=32))),
    }
    allowed = draws(st.one_of(st.none(), hnp.arrays(np.bool_, size)))
    possible = np.isfinite(logits) if allowed is None else np.isfinite(logits) & allowed
    if not possible.any():
        logits[0] = 0.0
        if allowed is not None:
            allowed[0] = True
    return logits, how, allowed


@given(
    case=rows_and_settings(),
    noise=st.one_of(st.floats(0, 1, exclude_max=True, width=32), st.sampled_from(EDGES)),
)
def test_the_logprob_is_that_of_the_distribution_left(
    case: tuple[np.ndarray, dict[str, float], np.ndarray | None], noise: float
) -> None:
    logits, how, only = case
    allowed = None if only is None else Allowed(np.zeros(1, np.int64), bits(only[None]))
    rows = torch.from_numpy(logits[None])
    (id,), (logprob,) = draw(rows, narrowing(1, **how), np.array([noise], np.float32), allowed)
    assert np.isfinite(logits[id]) and (only is None or only[id])
    # at an edge of top-p or min-p, and between probabilities that float32 cannot tell apart, either is right
    options = [
        target(logits, **{**how, "top_p": top_p, "min_p": min_p}, allowed=only)
        for top_p in (
            [1.0] if how["top_p"] == 1 else np.clip(how["top_p"] + np.array([-1e-5, 0, 1e-5]), 0, 1)
        )
        for min_p in np.clip(how["min_p"] * np.array([1 - 1e-5, 1, 1 + 1e-5]), 0, 1)
    ]
    near = np.flatnonzero(np.abs(logits - logits[id]) < 1e-5)
    assert any(p[j] > 0 and abs(logprob - np.log(p[j])) < 1e-3 for p in options for j in near)


def test_of_equal_tokens_the_lower_ids_stay() -> None:
    logits = torch.zeros((200, 40))
    ids, logprobs = draw(logits, narrowing(200, top_k=3), keyed_noise(200))
    assert set(ids.tolist()) == {0, 1, 2}
    assert np.allclose(logprobs, -np.log(3))
    ids, _ = draw(logits, narrowing(200, top_p=0.1), keyed_noise(200))
    assert set(ids.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("noise", [*EDGES, 0.3])
@pytest.mark.parametrize("size", [6, sampler.WHOLE + 70])
def test_what_is_impossible_is_never_drawn(noise: float, size: int) -> None:
    logits = np.full(size, -np.inf, np.float32)
    logits[1:5] = -200.0, 0.0, 0.1, -200.0
    ids, logprobs = draw(torch.from_numpy(logits[None]), narrowing(1), np.array([noise], np.float32))
    assert ids[0] in (2, 3) and np.isfinite(logprobs[0])


@pytest.mark.parametrize("size", [8, 32, 45, sampler.WHOLE + 70])
def test_a_constraint_holds_whichever_rows_have_one(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = torch.from_numpy(rng.normal(size=(12, size)).astype(np.float32))
    only = rng.random((12, size)) < 0.1
    only[:, 3] = True
    before, how, noise = logits.clone(), narrowing(12), keyed_noise(12)
    free, _ = draw(logits, how, noise)
    for rows in (np.arange(12), rng.permutation(12), np.array([7, 2]), np.array([], np.int64)):
        ids, logprobs = draw(logits, how, noise, Allowed(rows, bits(only[rows])))
        for i in range(12):
            if i in rows:
                p = target(logits[i].numpy(), allowed=only[i])
                assert only[i, ids[i]] and abs(logprobs[i] - np.log(p[ids[i]])) < 1e-5
            else:
                assert ids[i] == free[i]
    assert torch.equal(logits, before), "the caller's logits are as they were"


def test_a_row_that_may_draw_nothing_is_an_error() -> None:
    only = np.zeros((2, 40), bool)
    only[0, 39] = True
    nothing = bits(only)
    nothing[:, 1] |= np.uint32(1 << 20)  # beyond the vocabulary
    logits = torch.zeros((3, 40))
    with pytest.raises(EngineError, match="row 2 may draw nothing"):
        draw(logits, narrowing(3), keyed_noise(3), Allowed(np.array([0, 2]), nothing))
    logits[0, 39] = -torch.inf
    with pytest.raises(EngineError, match="not finite"):
        draw(logits, narrowing(3), keyed_noise(3), Allowed(np.array([0]), bits(only[:1])))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("size", [9, sampler.WHOLE + 70])
def test_logits_that_are_no_numbers_are_an_error(bad: float, how: dict[str, float], size: int) -> None:
    logits = torch.zeros((2, size))
    logits[1, 4] = bad
    with pytest.raises(EngineError, match="diverged"):
        draw(logits, narrowing(2, **how), keyed_noise(2))


def test_greedy_takes_the_most_likely_with_its_logprob_at_temperature_1() -> None:
    rows = torch.from_numpy(np.tile(LOGITS, (50, 1)))
    how = narrowing(50, 0.0, top_k=2, top_p=0.3, min_p=0.9)
    ids, logprobs = draw(rows, how, keyed_noise(50))
    assert set(ids.tolist()) == {int(LOGITS.argmax())}
    assert np.allclose(logprobs, np.log(target(LOGITS).max()), atol=1e-6)
    only = LOGITS < 1.2
    ids, logprobs = draw(rows, how, keyed_noise(50), Allowed(np.arange(50), bits(np.tile(only, (50, 1)))))
    assert set(ids.tolist()) == {1}
    assert np.allclose(logprobs, np.log(target(LOGITS, allowed=only)[1]), atol=1e-6)
    close = torch.tensor([[1e-3, 1e-3 + 1e-9]] * 2)  # equal as probabilities
    for other in (0.0, 1.0):
        how = replace(narrowing(2), temperature=np.array([0.0, other], np.float32))
        assert draw(close, how, keyed_noise(2))[0][0] == 1


def test_a_temperature_near_0_is_greedy_and_finite() -> None:
    ids, logprobs = draw(torch.tensor([[1e4, 9e3, 1e4 - 1.0]]), narrowing(1, 1e-38), keyed_noise(1))
    assert ids[0] == 0 and logprobs[0] == 0


@pytest.mark.parametrize("size", [12, 300, sampler.WHOLE + 70])
def test_rows_do_not_depend_on_each_other(size: int) -> None:
    rng = np.random.default_rng(0)
    n = 40 if size < sampler.WHOLE else 12
    logits = torch.from_numpy(rng.normal(size=(n, size)).astype(np.float32))
    logits = (logits * 4).round() / 4  # with ties
    how = Narrowing(
        rng.choice(np.array([0, 0.5, 1, 1.5], np.float32), n),
        rng.choice(np.array([0, 3, 7]), n),
        rng.choice(np.array([0.5, 1], np.float32), n),
        rng.choice(np.array([0, 0.2], np.float32), n),
    )
    only = rng.random((n, size)) < 0.7
    only[:, 0] = True
    rows, noise = np.flatnonzero(rng.random(n) < 0.5), keyed_noise(n)
    ids, logprobs = draw(logits, how, noise, Allowed(rows, bits(only[rows])))
    for i in range(n):
        one = slice(i, i + 1)
        alone = Narrowing(how.temperature[one], how.top_k[one], how.top_p[one], how.min_p[one])
        allowed = Allowed(np.zeros(1, np.int64), bits(only[one])) if i in rows else None
        id, logprob = draw(logits[one], alone, noise[one], allowed)
        assert id[0] == ids[i] and abs(logprob[0] - logprobs[i]) < 1e-6


def test_half_precision_logits_are_drawn_from_in_single() -> None:
    logits = torch.from_numpy(np.tile(LOGITS, (64, 1)))
    half = draw(logits.bfloat16(), narrowing(64), keyed_noise(64))
    single = draw(logits.bfloat16().float(), narrowing(64), keyed_noise(64))
    assert (half[0] == single[0]).all() and (half[1] == single[1]).all()


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
