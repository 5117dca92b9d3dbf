"""Leases over the slots of this machine.

Role: the pool of one process. Neighbours: the conductor asks, workers hold. Invariants: slices handed out
never exceed the capacity; waiters are served by priority, then in order, and nobody overtakes the first of
them; a lease ends exactly once; a holder that keeps a revoked lease past its deadline is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollwright.clock import Clock, within
from rollwright.errors import ConfigError, DeadlineExceeded, LeaseRevoked
from rollwright.events import LeaseChanged, Sink
from rollwright.pool.base import Lease, WorkKind

HANG_SECONDS = 30.0
"""How long a cancelled holder may take to clean up before `revoke` says that it hangs."""


@dataclass(eq=False)
class _LocalLease:
    """See `base.Lease`."""

    id: str
    kind: WorkKind
    slices: int
    clock: Clock
    holder: asyncio.Task[object]
    deadline: float | None = None
    """`clock.now()` at which it must be back; None while it is not revoked."""
    cancelled: bool = False
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def revoked(self) -> bool:
        return self.deadline is not None

    async def wait_revoked(self) -> float:
        await self.wanted.wait()
        assert self.deadline is not None
        return max(0.0, self.deadline - self.clock.now())

    def check(self) -> None:
        if self.deadline is not None:
            left = max(0.0, self.deadline - self.clock.now())
            raise LeaseRevoked(f"the pool wants {self.id} back within {left:g} s: finish and give it back")


@dataclass(order=True)
class _Waiter:
    """In line for slices; sorted by how soon it is served."""

    rank: tuple[int, int]
    kind: WorkKind = field(compare=False)
    slices: int = field(compare=False)
    ready: asyncio.Future[None] = field(compare=False)


class LocalPool:
    """Slots for one process: `capacity` is a number for each kind of work, or one number that all kinds
    share.

    A kind that is missing from the mapping has no slots. One event loop owns it.
    """

    def __init__(self, capacity: Mapping[WorkKind, int] | int, clock: Clock, events: Sink) -> None:
        self._capacity = capacity if isinstance(capacity, int) else dict(capacity)
        self._clock = clock
        self._events = events
        self._count = itertools.count(1)
        self._line: list[_Waiter] = []
        self._used: dict[WorkKind, int] = {}
        self._leases: dict[str, _LocalLease] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lease(
        self, kind: WorkKind, *, slices: int = 1, priority: int = 0, timeout: float = 60.0
    ) -> AsyncIterator[Lease]:
        """See `base`; a larger `priority` is served first.

        Raises:
            LeaseRevoked: on leaving, where the pool had to cancel the holder; other cancellations pass
            through.
        """
        holder = asyncio.current_task()
        assert holder is not None
        await self._acquire(kind, slices, priority, timeout)
        lease = _LocalLease(f"{kind.value}-{next(self._count)}", kind, slices, self._clock, holder)
        before = holder.cancelling()
        self._leases[lease.id] = lease
        self._say(lease, "taken")
        try:
            yield lease
        except asyncio.CancelledError:
            # As asyncio.timeout does: our own cancellation becomes an error, one from elsewhere goes on.
            if lease.cancelled and holder.uncancel() <= before:
                raise LeaseRevoked(f"{lease.id} was revoked and not given back in time") from None
            raise
        else:
            if lease.cancelled:
                holder.uncancel()
        finally:
            del self._leases[lease.id]
            self._release(kind, slices)
            lease.ended.set()
            self._say(lease, "returned")

    async def revoke(self, lease: str, deadline: float) -> None:
        """See `base`; returns when the lease has ended. Called by the holder itself it returns at once.

        A lease that has ended already is no error. Several calls: the earliest deadline counts.

        Raises:
            DeadlineExceeded: the holder was cancelled and still hangs after `HANG_SECONDS`.
        """
        held = self._leases.get(lease)
        if held is None:
            return
        due = self._clock.now() + deadline
        held.deadline = due if held.deadline is None else min(due, held.deadline)
        held.wanted.set()
        self._say(held, "revoked")
        # A task of its own: the deadline holds even if whoever revoked is cancelled.
        watcher = asyncio.create_task(self._enforce(held, deadline))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        if held.holder is not asyncio.current_task():
            await asyncio.shield(watcher)

    def held(self) -> dict[WorkKind, int]:
        return {kind: used for kind, used in self._used.items() if used}

    async def _enforce(self, lease: _LocalLease, seconds: float) -> None:
        try:
            await within(self._clock, lease.ended.wait(), seconds, lease.id)
        except DeadlineExceeded:
            if not lease.cancelled:
                lease.cancelled = True
                self._say(lease, "cancelled")
                lease.holder.cancel(f"{lease.id} was revoked and not given back in time")
            what = f"giving back {lease.id}, whose holder was cancelled,"
            await within(self._clock, lease.ended.wait(), HANG_SECONDS, what)

    async def _acquire(self, kind: WorkKind, slices: int, priority: int, timeout: float) -> None:
        total = self._total(kind)
        if not 1 <= slices <= total:
            raise ConfigError(f"{slices} slices for {kind.value} can never be had: expected 1 to {total}")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter((-priority, next(self._count)), kind, slices, ready)
        self._line.append(waiter)
        self._line.sort()
        self._serve()
        what = f"waiting for {slices} slices for {kind.value} (held by {', '.join(self._leases) or 'nobody'})"
        try:
            await within(self._clock, asyncio.shield(ready), timeout, what)
        except BaseException:  # boundary: cancelled or too late, what was just granted goes back
            if ready.done():
                self._release(kind, slices)
            else:
                self._line.remove(waiter)
                self._serve()
            raise

    def _total(self, kind: WorkKind) -> int:
        return self._capacity if isinstance(self._capacity, int) else self._capacity.get(kind, 0)

    def _free(self, kind: WorkKind) -> int:
        shared = isinstance(self._capacity, int)
        return self._total(kind) - (sum(self._used.values()) if shared else self._used.get(kind, 0))

    def _serve(self) -> None:
        """Give free slices to the front of the line; each kind with its own slots has a line of its own."""
        blocked: set[WorkKind] = set()
        for waiter in list(self._line):
            if waiter.kind in blocked:
                continue
            if waiter.slices <= self._free(waiter.kind):
                self._line.remove(waiter)
                self._used[waiter.kind] = self._used.get(waiter.kind, 0) + waiter.slices
                waiter.ready.set_result(None)
            else:
                blocked |= set(WorkKind) if isinstance(self._capacity, int) else {waiter.kind}

    def _release(self, kind: WorkKind, slices: int) -> None:
        self._used[kind] -= slices
        self._serve()

    def _say(self, lease: _LocalLease, change: str) -> None:
        self._events.emit(LeaseChanged(lease=lease.id, kind=lease.kind.value, change=change))
