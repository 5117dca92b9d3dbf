"""What every pool must do.

Role: the conformance suite of `pool.base`. Neighbours: `tests/contract`. Invariant: a check gets from
`make(n, clock)` a pool with `n` sampling slots on a virtual clock, so that no deadline takes real time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollwright.clock import Clock
from rollwright.errors import ConfigError, DeadlineExceeded, LeaseRevoked
from rollwright.pool.base import Lease, Pool, WorkKind
from rollwright.testing.clock import FakeClock

Make = Callable[[int, Clock], Pool]
KIND = WorkKind.SAMPLING


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def check_capacity(make: Make) -> None:
    """Slices in use never exceed the capacity, and all come back."""
    clock = FakeClock()
    pool = make(3, clock)
    seen: list[int] = []

    async def work(number: int) -> None:
        async with pool.lease(KIND, slices=1 + number % 3) as lease:
            assert lease.kind is KIND and lease.slices == 1 + number % 3 and not lease.revoked
            lease.check()
            seen.append(pool.held()[KIND])
            await clock.sleep(1.0)

    await asyncio.gather(*(work(number) for number in range(20)))
    assert len(seen) == 20 and max(seen) == 3
    assert pool.held() == {}


async def check_order(make: Make) -> None:
    """Higher priority first, then first come; a small request does not overtake a large one in front of
    it."""
    clock = FakeClock()
    pool = make(2, clock)
    order: list[str] = []

    async def work(name: str, slices: int, priority: int) -> None:
        async with pool.lease(KIND, slices=slices, priority=priority):
            order.append(name)
            await clock.sleep(1.0)

    async with pool.lease(KIND):
        tasks = []
        for name, slices, priority in (
            *(("large", 2, 1), ("low", 1, 0), ("low-too", 1, 0)),
            *(("urgent", 1, 9), ("small", 1, 1)),
        ):
            tasks.append(asyncio.create_task(work(name, slices, priority)))
            await settle()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "large", "small", "low", "low-too"]
    assert pool.held() == {}


async def check_timeout(make: Make) -> None:
    """Waiting ends with an error after the timeout, and what never fits is refused at once."""
    clock = FakeClock()
    pool = make(1, clock)
    async with pool.lease(KIND):
        try:
            async with pool.lease(KIND, timeout=5.0):
                raise AssertionError("two leases on one slot")
        except DeadlineExceeded:
            assert clock.now() >= 5.0
        for slices in (2, 0):
            try:
                async with pool.lease(KIND, slices=slices):
                    raise AssertionError("a lease that cannot fit")
            except ConfigError:
                pass
        assert pool.held() == {KIND: 1}
    async with pool.lease(KIND):
        assert pool.held() == {KIND: 1}


async def check_cancelled_waiter(make: Make) -> None:
    """Whoever is cancelled while waiting, or just when served, takes nothing away."""
    pool = make(1, FakeClock())

    async def work() -> None:
        async with pool.lease(KIND):
            await settle()

    for served in (False, True):
        async with pool.lease(KIND):
            task = asyncio.create_task(work())
            await settle()
            if not served:
                task.cancel()
                await settle()
        if served:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and pool.held() == {}


async def check_errors_give_back(make: Make) -> None:
    """A holder that fails gives back; its error passes unchanged."""
    pool = make(1, FakeClock())
    try:
        async with pool.lease(KIND):
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert pool.held() == {}


async def revocable(
    make: Make, holder: Callable[[Clock, Lease], Awaitable[None]]
) -> tuple[str, float, dict[WorkKind, int]]:
    """How a holder ends whose lease is revoked with a deadline of 10 s, when, and what is still held then."""
    clock = FakeClock()
    pool = make(1, clock)
    taken: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with pool.lease(KIND) as lease:
            taken.set_result(lease)
            await holder(clock, lease)

    task = asyncio.create_task(work())
    lease = await taken
    await pool.revoke(lease.id, 10.0)
    held, now = pool.held(), clock.now()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert lease.revoked
    await pool.revoke(lease.id, 1.0)  # it has ended: no error, nothing to wait for
    assert clock.now() == now
    return type(result).__name__, now, held


async def check_revoke_honoured(make: Make) -> None:
    """A holder that listens has its time, and ends as it likes; `revoke` returns when it has given back."""

    async def listens(clock: Clock, lease: Lease) -> None:
        assert 9.0 <= await lease.wait_revoked() <= 10.0
        await clock.sleep(3.0)

    async def checks(clock: Clock, lease: Lease) -> None:
        while True:
            lease.check()
            await clock.sleep(1.0)

    ended, now, held = await revocable(make, listens)
    assert (ended, held) == ("NoneType", {}) and 3.0 <= now < 10.0
    ended, now, held = await revocable(make, checks)
    assert (ended, held) == (LeaseRevoked.__name__, {}) and now <= 2.0


async def check_revoke_enforced(make: Make) -> None:
    """A holder that does not listen is cancelled at the deadline, and learns why."""

    async def ignores(clock: Clock, lease: Lease) -> None:
        await clock.sleep(1e6)

    ended, now, held = await revocable(make, ignores)
    assert (ended, held) == (LeaseRevoked.__name__, {}) and 10.0 <= now < 20.0


async def check_other_cancellation_passes(make: Make) -> None:
    """A holder cancelled by someone else, revoked or not, stays cancelled."""
    clock = FakeClock(auto=False)
    pool = make(1, clock)
    taken: list[Lease] = []

    async def work() -> None:
        async with pool.lease(KIND) as lease:
            taken.append(lease)
            await asyncio.Event().wait()

    for revoked in (False, True):
        task = asyncio.create_task(work())
        await settle()
        if revoked:
            revoking = asyncio.create_task(pool.revoke(taken[-1].id, 10.0))
            await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and pool.held() == {}
    await revoking


CHECKS: tuple[Callable[[Make], Awaitable[None]], ...] = (
    check_capacity,
    check_order,
    check_timeout,
    check_cancelled_waiter,
    check_errors_give_back,
    check_revoke_honoured,
    check_revoke_enforced,
    check_other_cancellation_passes,
)
