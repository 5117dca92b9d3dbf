"""The local pool beyond its contract: kinds, events, random traffic, holders that hang."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import ConfigError, DeadlineExceeded, LeaseRevoked
from rollwright.events import LeaseChanged, ListSink, NullSink
from rollwright.pool.base import Lease, WorkKind
from rollwright.pool.local import LocalPool
from rollwright.testing.clock import FakeClock
from rollwright.testing.pools import settle

KINDS = list(WorkKind)
REQUEST = st.tuples(
    st.sampled_from(KINDS),
    st.integers(1, 3),  # slices
    st.integers(0, 2),  # priority
    st.integers(1, 5),  # seconds of work
    st.sampled_from([1.0, 4.0, 1000.0]),  # timeout
    st.sampled_from(["finish", "fail", "cancelled", "revoked"]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=12), st.booleans())
def test_any_traffic_stays_within_capacity_and_comes_back(
    requests: list[tuple[WorkKind, int, int, int, float, str]], shared: bool
) -> None:
    clock, sink = FakeClock(), ListSink()
    pool = LocalPool(3 if shared else dict.fromkeys(KINDS, 3), clock, sink)

    async def work(request: tuple[WorkKind, int, int, int, float, str]) -> None:
        kind, slices, priority, seconds, timeout, end = request
        async with pool.lease(kind, slices=slices, priority=priority, timeout=timeout) as lease:
            held = pool.held()
            assert sum(held.values()) <= 3 if shared else all(used <= 3 for used in held.values())
            if end == "revoked":
                asyncio.get_running_loop().call_soon(
                    lambda: revoking.append(asyncio.create_task(pool.revoke(lease.id, 2.0)))
                )
            await clock.sleep(float(seconds))
            if end == "fail":
                raise ZeroDivisionError

    revoking: list[asyncio.Task[None]] = []

    async def everything() -> None:
        tasks = [asyncio.create_task(work(request)) for request in requests]
        await settle()
        for task, request in zip(tasks, requests, strict=True):
            if request[-1] == "cancelled":
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*revoking)
        expected = (ZeroDivisionError, asyncio.CancelledError, LeaseRevoked, DeadlineExceeded)
        assert all(result is None or isinstance(result, expected) for result in results), results

    asyncio.run(everything())
    assert pool.held() == {}
    changes: dict[str, list[str]] = {}
    for event in sink.events:
        assert isinstance(event, LeaseChanged)
        changes.setdefault(event.lease, []).append(event.change)
    for each in changes.values():
        assert each[0] == "taken" and each[-1] == "returned"
        assert each.count("taken") == each.count("returned") == 1


async def test_kinds_have_slots_of_their_own() -> None:
    pool = LocalPool({WorkKind.SAMPLING: 1, WorkKind.TRAINING: 1}, FakeClock(), NullSink())
    async with pool.lease(WorkKind.SAMPLING), pool.lease(WorkKind.TRAINING):
        assert pool.held() == {WorkKind.SAMPLING: 1, WorkKind.TRAINING: 1}
    with pytest.raises(ConfigError, match="expected 1 to 0"):
        async with pool.lease(WorkKind.SANDBOX):
            pass


async def test_shared_slots_are_shared() -> None:
    pool = LocalPool(1, FakeClock(), NullSink())
    async with pool.lease(WorkKind.SAMPLING):
        with pytest.raises(DeadlineExceeded, match="held by sampling-"):
            async with pool.lease(WorkKind.TRAINING, timeout=1.0):
                pass


async def test_a_holder_that_ignores_its_cancellation_is_named() -> None:
    clock = FakeClock()
    pool = LocalPool(1, clock, NullSink())
    taken: list[Lease] = []
    over = asyncio.Event()

    async def stubborn() -> None:
        async with pool.lease(WorkKind.SAMPLING) as lease:
            taken.append(lease)
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue

    task = asyncio.create_task(stubborn())
    await settle()
    with pytest.raises(DeadlineExceeded, match=f"giving back {taken[0].id}"):
        await pool.revoke(taken[0].id, 5.0)
    assert pool.held() == {WorkKind.SAMPLING: 1}  # it still works, so its slot is not free
    over.set()
    await task
    assert pool.held() == {} and task.cancelling() == 0


async def test_the_earliest_deadline_counts() -> None:
    clock = FakeClock()
    pool = LocalPool(1, clock, NullSink())
    taken: list[Lease] = []

    async def work() -> None:
        async with pool.lease(WorkKind.SAMPLING) as lease:
            taken.append(lease)
            await clock.sleep(1e6)

    task = asyncio.create_task(work())
    await settle()
    late = asyncio.create_task(pool.revoke(taken[0].id, 100.0))
    await settle()
    await pool.revoke(taken[0].id, 5.0)
    assert clock.now() < 100.0 and pool.held() == {}
    await late
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, LeaseRevoked)


async def test_the_deadline_holds_when_the_revoker_is_gone() -> None:
    clock = FakeClock()
    pool = LocalPool(1, clock, NullSink())

    async def work() -> None:
        async with pool.lease(WorkKind.SAMPLING) as lease:
            revoker = asyncio.create_task(pool.revoke(lease.id, 5.0))
            await settle()
            revoker.cancel()
            await clock.sleep(1e6)

    with pytest.raises(LeaseRevoked):
        await work()
    assert clock.now() < 100.0 and pool.held() == {}


async def test_a_holder_may_revoke_itself() -> None:
    pool = LocalPool(1, FakeClock(), NullSink())
    async with pool.lease(WorkKind.SAMPLING) as lease:
        await pool.revoke(lease.id, 5.0)
        with pytest.raises(LeaseRevoked, match="within 5 s"):
            lease.check()
    assert pool.held() == {}
