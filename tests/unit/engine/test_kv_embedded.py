"""What the embedded engine allocates is what was predicted from its settings."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.clock import SystemClock
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.kv.embedded import (
    POSITIONS,
    ROWS,
    Pool,
    admissible,
    expected,
    fitting,
    longest_tail,
    pool,
)
from rollwright.engine.kv.traffic import Traffic
from rollwright.events import NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.types import PolicyVersion, Sampling

MODEL = ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn=16, context=512)


async def most(config: EmbeddedConfig, traffic: Traffic, rollouts: int) -> int:
    """The most bytes that a real engine says while that many one-turn rollouts run."""
    model = Decoder(MODEL, 300)
    model.initialise(torch.Generator().manual_seed(0))
    served = config.build(model, PolicyVersion(run="x"), SystemClock(), NullSink())
    rng, found = np.random.default_rng(0), 0
    await served.start()
    try:
        running = asyncio.ensure_future(
            asyncio.gather(
                *(
                    served.generate(
                        rng.integers(0, 300, traffic.prompt, dtype=np.int32),
                        Sampling(max_tokens=traffic.sampled),
                        request=str(i),
                    )
                    for i in range(rollouts)
                )
            )
        )
        while not running.done():
            found = max(found, (await served.health()).kv_bytes)
            await asyncio.sleep(0)
        await running
    finally:
        await served.close()
    return found


@pytest.mark.parametrize(
    ("batch", "traffic", "rows", "positions"),
    [(5, Traffic(prompt=20, sampled=9), 8, 64), (9, Traffic(prompt=60, sampled=10), 16, 128)],
)
def test_a_real_engine_holds_what_was_predicted(
    batch: int, traffic: Traffic, rows: int, positions: int
) -> None:
    config = EmbeddedConfig(max_batch=batch, kv_tokens=40 * traffic.length)
    values = 2 * 1 * 1 * 8
    plan = expected(config, values, traffic, groups=120, requests=120)
    assert (plan.rows, plan.positions, plan.token_bytes) == (rows, positions, 64)
    assert plan.cached == config.kv_tokens
    measured = asyncio.run(most(config, traffic, 120))
    assert measured <= plan.bytes
    assert plan.bytes == pytest.approx(measured, rel=0.01)


def test_the_engines_rounding_by_hand() -> None:
    config = EmbeddedConfig(max_batch=12, row_tokens=100, kv_tokens=1000, host_tokens=500)
    found = pool(config, 16, requests=64, tail=4096)
    assert found == Pool(token_bytes=64, rows=16, positions=128, cached=1000, host=500)
    assert (found.row_bytes, found.cache_bytes, found.host_bytes) == (131_072, 64_000, 32_000)
    assert found.bytes == 195_072
    assert pool(config, 16, requests=3, tail=64, cached=10).bytes == (8 * 64 + 10) * 64


def test_tails() -> None:
    config = EmbeddedConfig(row_tokens=1024)
    assert longest_tail(config, Traffic(prompt=50, sampled=32)) == 81
    grouped = Traffic(prompt=200, shared=60, turns=4, sampled=16, observed=24, group=8)
    assert longest_tail(config, grouped) == 215  # the first member computes the prompt in its row
    alone = Traffic(prompt=200, turns=4, sampled=16, observed=24)
    assert longest_tail(config, alone) == alone.length - 1  # it takes its history back into its row
    assert longest_tail(config, Traffic(prompt=600, turns=2, sampled=16, observed=24)) == 615
    assert longest_tail(config, Traffic(prompt=3000, turns=2)) == 1024


@given(
    *(st.integers(1, 300), st.integers(16, 5000), st.integers(1, 100_000), st.integers(0, 100_000)),
    *(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 2**26)),
)
def test_a_setting_that_fits_is_the_largest_that_does(
    batch: int, row: int, cached: int, host: int, requests: int, tail: int, budget: int
) -> None:
    config = EmbeddedConfig(max_batch=batch, row_tokens=row, kv_tokens=cached, host_tokens=host)

    def size(changed: EmbeddedConfig) -> int:
        found = pool(changed, 16, requests=requests, tail=tail)
        return found.bytes + found.host_bytes

    for key, value in fitting(config, 16, budget, requests=requests, tail=tail):
        assert value < getattr(config, key)
        assert size(config.model_copy(update={key: value})) <= budget
        if size(config) > budget:
            assert size(config.model_copy(update={key: value + 1})) > budget


@given(st.integers(1, 500), st.integers(1, 5000))
def test_rows_and_positions_are_whole_steps_and_enough(requests: int, tail: int) -> None:
    config = EmbeddedConfig(max_batch=64, row_tokens=1024)
    found = pool(config, 2, requests=requests, tail=tail)
    assert found.rows % ROWS == 0 and min(requests, 64) <= found.rows < min(requests, 64) + ROWS
    assert found.positions % POSITIONS == 0
    assert min(tail, 1024) <= found.positions < min(tail, 1024) + POSITIONS


@given(st.integers(1, 64), st.integers(16, 512), st.integers(1, 20_000), st.integers(1, 4_000))
def test_admitted_rollouts_have_a_place_and_one_more_has_none(
    batch: int, row: int, cache: int, tokens: int
) -> None:
    config = EmbeddedConfig(max_batch=batch, row_tokens=row, kv_tokens=cache)

    def fits(rollouts: int) -> bool:
        """Whether all histories lie in rows, as far as these go, or in the cache."""
        in_rows = min(rollouts, batch) * min(row, tokens)
        return rollouts * tokens - in_rows <= cache

    admitted = admissible(config, tokens)
    assert fits(admitted) or admitted == 1
    assert not fits(admitted + 1)
