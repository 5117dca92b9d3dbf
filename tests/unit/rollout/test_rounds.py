"""Rounds: what is computed together hangs on what was computed before, never on how long tools take."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.rollout.groups import next_number, number_of
from rollwright.rollout.rounds import Rounds
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.types import Identity, PolicyVersion, Sampling

TURNS = 3


async def played(members: int, slots: int, pauses: random.Random) -> list[str]:
    """The requests in the order in which they reached the engine, for rollouts of one to three turns with
    tool calls of random length, `slots` of them at once."""
    engine = ScriptedEngine(lambda prompt: ([1, 2], [-1.0, -1.0]), version=PolicyVersion(run="r"))
    rounds, free = Rounds(engine), asyncio.Semaphore(slots)
    await rounds.start()

    async def rollout(number: int) -> None:
        async with free:
            with rounds.present():
                await asyncio.sleep(pauses.random() / 500)  # its sandbox
                for turn in range(1 + number % TURNS):
                    name = f"{number:02d}/{turn}"
                    await rounds.generate(np.array([3], np.int32), Sampling(max_tokens=4), request=name)
                    await asyncio.sleep(pauses.random() / 500)  # its tool

    await asyncio.gather(*(rollout(number) for number in range(members)))
    await rounds.close()
    return [name for name, _, _ in engine.requests]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**16))
def test_the_order_of_requests_is_the_same_however_long_tools_take(
    members: int, slots: int, seed: int
) -> None:
    one, other = (asyncio.run(played(members, slots, random.Random(seed + i))) for i in (0, 1))
    assert one == other
    assert len(one) == sum(1 + number % TURNS for number in range(members))


async def test_a_rollout_that_never_asks_holds_a_round_until_it_is_over() -> None:
    engine = ScriptedEngine(lambda prompt: ([1], [-1.0]), version=PolicyVersion(run="r"))
    rounds = Rounds(engine)
    await rounds.start()
    with rounds.present():
        asked = asyncio.ensure_future(
            rounds.generate(np.array([3], np.int32), Sampling(max_tokens=1), request="a")
        )
        with rounds.present():
            await asyncio.sleep(0.05)
            assert not engine.requests
        await asyncio.wait_for(asked, 5)
    assert [name for name, _, _ in engine.requests] == ["a"]
    await rounds.close()


async def test_a_request_that_is_cancelled_while_it_waits_is_forgotten() -> None:
    engine = ScriptedEngine(lambda prompt: ([1], [-1.0]), version=PolicyVersion(run="r"))
    rounds = Rounds(engine)
    await rounds.start()
    with rounds.present(), rounds.present():
        asked = asyncio.ensure_future(
            rounds.generate(np.array([3], np.int32), Sampling(max_tokens=1), request="a")
        )
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    await asyncio.sleep(0.05)
    assert not engine.requests
    await rounds.close()


def test_the_next_task_is_the_one_after_the_largest_that_was_started() -> None:
    def started(group: str, job: str = "train") -> Identity:
        return Identity(run="r", group=group, job=job)

    assert next_number([]) == 0
    assert next_number([started("1-g4"), started("0-g17"), started("0-before-g99", "eval")]) == 18
    assert number_of("1-g4") == 4 and number_of("policy") == -1
