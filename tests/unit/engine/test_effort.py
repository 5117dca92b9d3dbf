"""Prompts lengthen a step by what `stall` says and no more, counted in work."""

import asyncio
from typing import Any

import numpy as np
import pytest
from cold import Kind, copied, decoder
from hypothesis import given
from hypothesis import strategies as st

from rollwright.clock import SystemClock
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.effort import CHUNK, Effort
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.engine.embedded.plan import Plan
from rollwright.engine.embedded.scheduler import SHORT
from rollwright.events import NullSink
from rollwright.types import Ints, PolicyVersion, Sampling

VERSION = PolicyVersion(run="effort")
EFFORT = Effort(decoder(Kind(), 0).shape, 900_000)


def ids(seed: int, length: int) -> Ints:
    return np.random.default_rng(seed).integers(0, 60, length).astype(np.int32)


@given(st.floats(0.001, 1e5), st.integers(0, 100_000), st.integers(0, 9))
def test_an_allowance_buys_the_most_tokens_that_it_pays_for(
    allowance: float, history: int, pieces: int
) -> None:
    tokens = EFFORT.tokens(allowance, history, pieces)
    slack = 1e-9 * allowance + 1e-9
    assert tokens == 1 or EFFORT.prompt(tokens, history, pieces) <= allowance + slack
    assert EFFORT.prompt(tokens + 1, history, pieces) > allowance - slack


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(0, 5000))
def test_the_tokens_of_a_prompt_cost_the_same_in_chunks(sizes: list[int], history: int) -> None:
    at, cost = history, 0.0
    for size in sizes:
        cost += EFFORT.prompt(size, at, 0) - CHUNK
        at += size
    assert cost == pytest.approx(EFFORT.prompt(at - history, history, 0) - CHUNK)


async def plans(stall: float, **settings: int) -> list[tuple[Plan, float, float]]:
    """Each step with decoding requests and prompts, while long prompts come beside four that decode: the
    plan, what the decoding ones cost and what the prompts do but for their last token."""
    engine = EmbeddedEngine(
        copied(Kind(), 0), EmbeddedConfig(stall=stall, **settings), VERSION, SystemClock(), NullSink()
    )
    scheduler: Any = engine._scheduler
    effort, found, advance = scheduler._effort, [], scheduler._stepper.advance

    def watched(batch: Any, plan: Plan, drawn: Any) -> Any:
        if plan.decoding and plan.chunks:
            seen = int(plan.positions[: plan.decoding].sum())
            cut = [chunk for chunk in plan.chunks if batch.length[chunk.row] - chunk.start > SHORT]
            cost = sum(effort.prompt(chunk.end - chunk.start, chunk.start, 0) for chunk in cut)
            if cut:
                cost -= effort.prompt(1, cut[-1].end - 1, 0)  # one is always computed
                found.append((plan, effort.decode(plan.decoding, seen), cost))
        return advance(batch, plan, drawn)

    scheduler._stepper.advance = watched
    await engine.start()
    jobs = [
        asyncio.create_task(engine.generate(ids(i, 5), Sampling(max_tokens=120), request=str(i)))
        for i in range(4)
    ]
    for _ in range(9):
        await asyncio.sleep(0)
    jobs += [
        asyncio.create_task(engine.generate(ids(10 + i, 150), Sampling(max_tokens=3), request=f"long {i}"))
        for i in range(3)
    ]
    await asyncio.gather(*jobs)
    await engine.close()
    return found


@pytest.mark.parametrize("stall", [0.05, 0.5, 2.0])
async def test_long_prompts_take_their_share_of_a_step_and_no_more(stall: float) -> None:
    found = await plans(stall)
    assert found
    for plan, decode, prompts in found:
        assert plan.decoding >= 4, "somebody who decodes was left out"
        assert prompts < stall * decode, "more than a token beyond what is allowed"
    _, decode, prompts = found[0]
    assert prompts > stall * decode - CHUNK - 3, "less than allowed"


async def test_without_decoding_requests_a_prompt_is_not_cut() -> None:
    engine = EmbeddedEngine(copied(Kind(), 0), EmbeddedConfig(stall=0.01), VERSION, SystemClock(), NullSink())
    await engine.start()
    await engine.generate(ids(0, 150), Sampling(max_tokens=1), request="a")
    assert (await engine.health()).steps == 1
    await engine.close()
