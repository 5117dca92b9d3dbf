"""Between the thread that speaks HTTP and the one that computes.

Role: what `public`, `control` and `completions` call. A step of the engine holds its event loop for as long
as it takes; HTTP in a loop of its own answers meanwhile, and gets in between two steps in one turn, however
many turns a request takes on its own side. Neighbours: `desk` in the engine's loop. Invariants: engine and
desk are touched in the engine's loop only; leaving a call or a job here ends it there, even where leaving is
cut short; what a client doesn't fetch is kept up to a bound, and then ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rollwright.engine.base import Health, PauseMode
from rollwright.engine.serve.desk import Desk
from rollwright.engine.serve.job import Job, Line
from rollwright.engine.serve.wire import Choice, UpdateRequest
from rollwright.errors import EngineClosed, EngineError
from rollwright.types import Floats, Ints

T = TypeVar("T")


BEHIND = 4096
"""Pieces of a line that wait for a client to read them, at most."""


class _Arrivals:
    """What the engine's thread puts and this one takes, in order."""

    def __init__(self, most: int) -> None:
        self._here, self._queue = asyncio.get_running_loop(), asyncio.Queue[Choice | Exception]()
        self._most = most
        self._put = self._taken = 0  # each is written by one thread only

    def put(self, found: Choice | Exception) -> None:
        """Called in the engine's thread.

        Raises:
            EngineError: this is a piece too many.
        """
        if isinstance(found, Choice) and self._put - self._taken >= self._most:
            raise EngineError(
                f"{self._most} pieces wait for a client that does not read them: its request ends"
            )
        self._put += 1
        if not self._here.is_closed():
            self._here.call_soon_threadsafe(self._queue.put_nowait, found)

    async def take(self) -> Choice | Exception:
        """The next one."""
        found = await self._queue.get()
        self._taken += 1
        return found


class Answers:
    """The choices of a job, on this side."""

    def __init__(self, job: Job, arrived: _Arrivals) -> None:
        self.names, self.prompt_tokens = job.names, job.prompt_tokens
        self._open, self._arrived = len(job.names), arrived

    async def next(self) -> Choice | None:
        """The next choice or piece of one; None when all lines have ended.

        Raises:
            Exception: the error that ended a line.
        """
        if not self._open:
            return None
        found = await self._arrived.take()
        if isinstance(found, Exception):
            raise found
        if found.finish_reason is not None:
            self._open -= 1
        return found


class Bridge:
    """`desk`, whose loop is the one that makes this, for another loop."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._there = desk, asyncio.get_running_loop()

    @asynccontextmanager
    async def job(
        self, lines: Sequence[Line], *, stream: bool, session: str = "", priority: int = 0, owner: str = ""
    ) -> AsyncIterator[Answers]:
        """See `desk`."""
        arrived = _Arrivals(BEHIND * len(lines))
        job = self._desk.made(
            lines, arrived.put, stream=stream, session=session, priority=priority, owner=owner
        )
        try:
            await self._call(self._desk.begin(job))
            yield Answers(job, arrived)
        finally:  # this may be cancelled on its way; the end is not, or its place would be lost
            await asyncio.shield(self._call(self._desk.end(job)))

    async def score(self, tokens: Ints, temperature: float) -> Floats:
        """See `desk`."""
        return await self._call(self._desk.score(tokens, temperature))

    async def health(self) -> Health:
        """See `desk`."""
        return await self._call(self._desk.health())

    async def abort(self, requests: Sequence[str], owner: str | None) -> None:
        """See `desk`."""
        await self._call(self._desk.abort(requests, owner))

    async def pause(self, mode: PauseMode) -> list[str]:
        """See `desk`."""
        return await self._call(self._desk.pause(mode))

    async def resume(self) -> None:
        """See `desk`."""
        await self._call(self._desk.resume())

    async def update(self, request: UpdateRequest) -> float:
        """See `desk`."""
        return await self._call(self._desk.update(request))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives in the engine's loop; cancelling this cancels it there."""
        try:
            given = asyncio.run_coroutine_threadsafe(work, self._there)
        except RuntimeError as error:  # its loop is closed
            work.close()
            raise EngineClosed("the server is stopping") from error
        return await asyncio.wrap_future(given)
