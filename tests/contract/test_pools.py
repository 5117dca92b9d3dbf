"""The pool keeps the contract of leases, with slots by kind and with shared ones."""

from collections.abc import Awaitable, Callable

import pytest

from rollwright.clock import Clock
from rollwright.events import NullSink
from rollwright.pool.base import Pool, WorkKind
from rollwright.pool.local import LocalPool
from rollwright.testing.pools import CHECKS, Make


def by_kind(slots: int, clock: Clock) -> Pool:
    return LocalPool({WorkKind.SAMPLING: slots}, clock, NullSink())


def shared(slots: int, clock: Clock) -> Pool:
    return LocalPool(slots, clock, NullSink())


@pytest.mark.parametrize("make", [by_kind, shared])
@pytest.mark.parametrize("check", CHECKS)
async def test_pool(check: Callable[[Make], Awaitable[None]], make: Make) -> None:
    await check(make)
