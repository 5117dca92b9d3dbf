"""What the two ports do with the engine, without HTTP.

Role: opens, aborts and counts jobs; pauses and updates the engine; drains it before the end. Neighbours:
`public` and `control` call it, `server` drains it. Invariants: a request can be aborted over the public port
only by who knows its owner's secret; while draining nothing new is taken.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from rollwright.clock import Clock
from rollwright.engine.base import Engine, Health, InFlight, PauseMode
from rollwright.engine.serve.job import Job, Line, Put
from rollwright.engine.serve.weights import WeightsFolder
from rollwright.engine.serve.wire import UpdateRequest
from rollwright.errors import EngineClosed, EngineError
from rollwright.types import Floats, Ints

MOST_JOBS = 4096
"""Requests under way at once; more are refused, so that clients cannot fill the memory."""
SETTLE_TURNS = 64
"""Turns of the event loop in which what an engine ended reaches its job."""
END_SECONDS = 5.0
"""How long an aborted request may take to end."""


class Busy(EngineError):
    """Too many requests are under way."""


class Desk:
    """`engine` as the ports see it; `weights` is where updates lie, None where there are none."""

    def __init__(self, engine: Engine, clock: Clock, weights: WeightsFolder | None = None) -> None:
        self._engine, self._clock, self._weights = engine, clock, weights
        self._jobs: set[Job] = set()
        self._draining = False

    def made(
        self,
        lines: Sequence[Line],
        put: Put,
        *,
        stream: bool,
        session: str = "",
        priority: int = 0,
        owner: str = "",
    ) -> Job:
        """A job that isn't begun; `put` is called in the engine's loop with what comes of it."""
        return Job(self._engine, lines, put, stream=stream, session=session, priority=priority, owner=owner)

    async def begin(self, job: Job) -> None:
        """Hand `job` to the engine. `end` has to follow, whatever this raises.

        Raises:
            EngineClosed: the server is stopping.
            Busy: too many are under way.
            Exception: what the engine refuses it with.
        """
        if self._draining:
            raise EngineClosed("the server is stopping: it takes nothing more")
        if len(self._jobs) >= MOST_JOBS:
            raise Busy(f"{len(self._jobs)} requests are under way: send this one again later")
        self._jobs.add(job)
        await job.begin()

    async def end(self, job: Job) -> None:
        """End what still runs of `job` and forget it."""
        await job.close()
        self._jobs.discard(job)

    async def score(self, tokens: Ints, temperature: float) -> Floats:
        """See `engine.base`."""
        return await self._engine.score(tokens, temperature=temperature)

    async def health(self) -> Health:
        """See `engine.base`; not ready while draining."""
        found = await self._engine.health()
        return replace(found, ready=False) if self._draining else found

    async def abort(self, requests: Sequence[str], owner: str | None) -> None:
        """End these and return when they have ended. With an `owner`, only those sent with it.

        Raises:
            ValueError: the owner is empty.
        """
        if owner == "":
            raise ValueError("owner: give the one that the requests were sent with")
        wanted = set(requests)
        jobs = [job for job in self._jobs if wanted.intersection(job.names) and _owns(job, owner)]
        names = [name for job in jobs for name in job.running if name in wanted]
        await self._engine.abort(names)
        await self._ended([job for job in jobs if wanted.issuperset(job.names)])

    async def pause(self, mode: PauseMode) -> list[str]:
        """Pause; the requests that wait until `resume`."""
        await self._engine.pause(mode)
        for _ in range(SETTLE_TURNS):
            held = [name for job in self._jobs for name in job.running]
            health = await self._engine.health()
            if len(held) <= health.running + health.waiting:
                break
            await asyncio.sleep(0)
        return held

    async def resume(self) -> None:
        """See `engine.base`."""
        await self._engine.resume()

    async def update(self, request: UpdateRequest) -> float:
        """Load the weights that `request` names, and give them to the engine; the gap to the probe.

        Raises:
            EngineError: this server has no weights folder.
            StoreError, SchemaError: they are not there, or damaged.
            WeightMismatch: as the engine says it.
        """
        if self._weights is None:
            raise EngineError("this server takes no weights: it was started without a weights folder")
        state = await asyncio.to_thread(self._weights.get, request.digest)
        return await self._engine.update(state, request.version, request.probe(), InFlight(request.in_flight))

    async def drain(self, seconds: float) -> int:
        """Take nothing more; let what is under way end within `seconds`, then abort it. How many were
        aborted."""
        self._draining = True
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, seconds)))
        try:
            while self._jobs and not timer.done():
                waits = [asyncio.ensure_future(job.ended()) for job in self._jobs]
                await asyncio.wait([timer, *waits], return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if all(not job.running for job in self._jobs):
                    break
        finally:
            timer.cancel()
        left = [name for job in self._jobs for name in job.running]
        await self._engine.abort(left)
        await self._ended(list(self._jobs))
        return len(left)

    async def _ended(self, jobs: Sequence[Job]) -> None:
        """Wait for their end, a while at most."""
        waits = [asyncio.ensure_future(job.ended()) for job in jobs]
        if not waits:
            return
        timer = asyncio.ensure_future(self._clock.sleep(END_SECONDS))
        every = asyncio.ensure_future(asyncio.wait(waits))
        try:
            await asyncio.wait([timer, every], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (timer, every, *waits):
                task.cancel()


def _owns(job: Job, owner: str | None) -> bool:
    return owner is None or hmac.compare_digest(job.owner.encode(), owner.encode())


def named(name: str, count: int) -> list[str]:
    """The names of `count` requests that a client calls `name`, or leaves to us."""
    stem = name or f"request-{secrets.token_hex(8)}"
    return [stem] if count == 1 else [f"{stem}/{i}" for i in range(count)]
