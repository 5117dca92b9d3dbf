"""Between the thread that speaks HTTP and the one that computes.

Role: what `public`, `control` and `completions` call. A step of the engine holds its event loop for as long
as it takes; HTTP in a loop of its own answers meanwhile, and gets in between two steps in one turn, however
many turns a request takes on its own side. Neighbours: `desk` in the engine's loop. Invariants: engine and
desk are touched in the engine's loop only; leaving a call or a job here ends it there.
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
from rollwright.errors import EngineClosed
from rollwright.types import Floats, Ints

T = TypeVar("T")


class Answers:
    """The choices of a job, on this side."""

    def __init__(self, job: Job, arrived: asyncio.Queue[Choice | Exception]) -> None:
        self.names, self.prompt_tokens = job.names, job.prompt_tokens
        self._open, self._arrived = len(job.names), arrived

    async def next(self) -> Choice | None:
        """The next choice or piece of one; None when all lines have ended.

        Raises:
            Exception: the error that ended a line.
        """
        if not self._open:
            return None
        found = await self._arrived.get()
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
        here, arrived = asyncio.get_running_loop(), asyncio.Queue[Choice | Exception]()

        def put(found: Choice | Exception) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(arrived.put_nowait, found)

        job = self._desk.made(lines, put, stream=stream, session=session, priority=priority, owner=owner)
        try:
            await self._call(self._desk.begin(job))
            yield Answers(job, arrived)
        finally:
            await self._call(self._desk.end(job))

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
