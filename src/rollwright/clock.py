"""Time, as a part that is handed in.

Role: one small seam for now, wall time and sleep, so that deadlines can be tested without waiting; and the
deadline itself (`within`). Neighbours: every part that waits takes a `Clock`. Invariant: nothing outside
this file calls `time` to decide anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from rollwright.errors import DeadlineExceeded, RollwrightError

GRACE_SECONDS = 2.0
"""How long work that was cancelled may take to clean up before it is left to itself."""

T = TypeVar("T")


class Clock(Protocol):
    """Monotonic and wall seconds, and an asynchronous sleep."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, for records people read."""

    async def sleep(self, seconds: float) -> None:
        """Give way for `seconds`."""

    def pause(self, seconds: float) -> None:
        """Block this thread for `seconds`; only for processes without an event loop."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


async def within(clock: Clock, work: Awaitable[T], seconds: float, what: str) -> T:
    """What `work` gives, if it gives it within `seconds` of `clock`.

    Work that is late, or whose waiter is cancelled, is cancelled and given `GRACE_SECONDS` to clean up;
    work that ignores that is left behind, so that nothing here waits for ever.

    Raises:
        DeadlineExceeded: it did not finish; `what` names it.
        RollwrightError: it was cancelled, and not by us: its waiter goes on.
    """
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(max(0.0, seconds)))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if task.cancelled():
            raise RollwrightError(f"{what} was cancelled from inside")
        if task.done():
            return task.result()
        raise DeadlineExceeded(what, seconds)
    finally:
        timer.cancel()
        await let_go(clock, task)


async def let_go(clock: Clock, *tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until they have ended, `GRACE_SECONDS` at most; their results and errors are
    dropped."""
    running = [task for task in tasks if not task.done()]
    for task in tasks:
        task.cancel()
        task.add_done_callback(_take_error)
    if running:
        ended = asyncio.ensure_future(asyncio.wait(running))
        timer = asyncio.ensure_future(clock.sleep(GRACE_SECONDS))
        try:
            await asyncio.wait({ended, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            timer.cancel()


def _take_error(task: asyncio.Future[Any]) -> None:
    """Mark an error that nobody waits for as seen."""
    if not task.cancelled():
        task.exception()
