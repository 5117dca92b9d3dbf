"""Leases and the stop signal, joined: being asked to stop is having one's lease revoked.

Role: one mechanism for Ctrl-C and for a pool that wants its machine back. Neighbours: every worker's
`work`. Invariant: a worker that is asked to stop learns it from its lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollwright.clock import Clock
from rollwright.events import EventLog
from rollwright.pool.base import Lease, WorkKind
from rollwright.pool.local import LocalPool
from rollwright.run.stop import Stop

STOP_SECONDS = 15.0
"""What a worker has to finish the present piece of work."""


@asynccontextmanager
async def leased(
    clock: Clock, events: EventLog, stop: Stop, *kinds: WorkKind
) -> AsyncIterator[dict[WorkKind, Lease]]:
    """Hold one lease for each of `kinds` from this machine's pool. A stop revokes them all."""
    pool = LocalPool(dict.fromkeys(kinds, 1), clock, events)
    loop = asyncio.get_running_loop()
    revoking: set[asyncio.Task[None]] = set()
    async with _hold(pool, list(kinds)) as leases:

        def revoke() -> None:
            for lease in leases:
                task = loop.create_task(pool.revoke(lease.id, STOP_SECONDS))
                revoking.add(task)
                task.add_done_callback(revoking.discard)

        def soon() -> None:
            loop.call_soon_threadsafe(revoke)

        stop.callbacks.append(soon)
        if stop.asked:
            revoke()
        yield {lease.kind: lease for lease in leases}


@asynccontextmanager
async def _hold(pool: LocalPool, kinds: list[WorkKind]) -> AsyncIterator[list[Lease]]:
    if not kinds:
        yield []
        return
    async with pool.lease(kinds[0]) as first, _hold(pool, kinds[1:]) as rest:
        yield [first, *rest]
