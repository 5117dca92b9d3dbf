"""A clock that tests move: sleeping takes no real time.

Role: stands in for `SystemClock`. Neighbours: whatever takes a `Clock`. Invariants: time never runs
backwards; sleepers wake in order of their wake time; time jumps only when `patience` rounds of the event loop
went by without a new sleeper.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Virtual seconds. With `auto` (the default) time jumps forward as soon as the event loop seems idle.

    What waits for something outside the event loop (a thread, a subprocess, a socket) looks idle to this
    clock: use `auto=False` there and move time with `advance`.
    """

    def __init__(
        self, *, start: float = 0.0, epoch: float = 1_700_000_000.0, auto: bool = True, patience: int = 50
    ) -> None:
        self._now = start
        self._epoch = epoch - start
        self._auto = auto
        self._patience = patience
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._rounds = 0
        self._ticking: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._epoch + self._now

    @property
    def sleepers(self) -> int:
        """How many are asleep."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        if self._auto:
            self._rounds = 0  # a new sleeper means that something ran
            if self._ticking is not loop:
                self._ticking = loop
                loop.call_soon(self._tick, loop)
        await future

    def pause(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move time and wake who is due; they run at the next `await`."""
        self._wake(self._now + seconds)

    def _wake(self, until: float) -> None:
        while self._sleepers and (self._sleepers[0][0] <= until or self._sleepers[0][2].done()):
            due, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                self._now = max(self._now, due)
                future.set_result(None)
        self._now = max(self._now, until)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """One round of the event loop passed; jump to the next wake time when enough did."""
        self._rounds += 1
        if self._rounds >= self._patience:
            self._rounds = 0
            waiting = [due for due, _, future in self._sleepers if not future.done()]
            if not waiting:
                self._sleepers.clear()
                self._ticking = None
                return
            self._wake(min(waiting))
        loop.call_soon(self._tick, loop)
