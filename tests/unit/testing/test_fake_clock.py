"""The fake clock keeps order and takes no real time."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rollwright.testing.clock import FakeClock


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=8))
def test_sleepers_wake_in_order_at_their_time(delays: list[float]) -> None:
    clock, woke = FakeClock(), []

    async def one(delay: float) -> None:
        await clock.sleep(delay)
        woke.append((clock.now(), delay))

    async def everyone() -> None:
        await asyncio.gather(*map(one, delays))

    asyncio.run(everyone())
    assert woke == sorted((delay, delay) for delay in delays)
    assert clock.sleepers == 0


async def test_a_task_that_finishes_in_time_beats_its_deadline() -> None:
    clock = FakeClock()

    async def work() -> str:
        for _ in range(20):
            await asyncio.sleep(0)
        return "done"

    working, deadline = asyncio.create_task(work()), asyncio.create_task(clock.sleep(1000.0))
    await asyncio.wait({working, deadline}, return_when=asyncio.FIRST_COMPLETED)
    deadline.cancel()
    assert working.done() and clock.now() == 0.0


async def test_by_hand() -> None:
    clock = FakeClock(auto=False)
    sleeping = asyncio.create_task(clock.sleep(5.0))
    for _ in range(200):
        await asyncio.sleep(0)
    assert not sleeping.done() and clock.sleepers == 1
    clock.advance(4.0)
    await asyncio.sleep(0)
    assert not sleeping.done()
    clock.advance(1.0)
    await sleeping
    assert clock.now() == 5.0 and clock.wall() == 1_700_000_005.0
