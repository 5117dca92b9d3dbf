"""An engine that works in rounds, so that a run repeats exactly.

Role: between the rollouts and an engine in the same event loop. Which requests an engine computes together
changes the rounding of its sums, and with it, now and then, a token; left alone that hangs on how long tools
take. Here a round begins only when every rollout that is under way waits for the engine, and its requests
are given out in the order of their ids; what a rollout does between two rounds may take as long as it likes.
Neighbours: the factory says who is under way; coupled mode and `eval` use it, async mode doesn't. Invariants:
the requests of a round depend on the rounds before and nothing else; while the first ones of a round use
their tools, the others are still computed.

waits for: the rollouts under way · unblocked by: each one's next request or end; their own deadlines bound it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from msgspec.structs import replace

from rollwright.engine.base import Engine, Health, InFlight, PauseMode
from rollwright.types import Chunk, Completion, Floats, Ints, PolicyVersion, Probe, Sampling

SETTLED = 64
"""Turns of the event loop without a change after which nothing more is on its way without waiting for
something outside; from the end of one rollout to the start of the one that takes its place are a dozen."""


class Rounds:
    """`engine` in rounds; an `Engine` itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._present = 0
        self._paused = False  # then requests go to the engine, which keeps them
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._playing: set[str] = set()
        self._changed = asyncio.Event()
        self._player: asyncio.Task[None] | None = None

    @contextmanager
    def present(self) -> Iterator[None]:
        """A rollout is under way: no round begins before it waits for the engine or is over."""
        self._present += 1
        self._changed.set()
        try:
            yield
        finally:
            self._present -= 1
            self._changed.set()

    async def start(self) -> None:
        """See `engine.base`."""
        await self._engine.start()
        if self._player is None:
            self._player = asyncio.create_task(self._play())

    async def close(self) -> None:
        """See `engine.base`."""
        await self._engine.close()
        if self._player is not None:
            self._player.cancel()
            await asyncio.gather(self._player, return_exceptions=True)
            self._player = None
        await self._let_in(sorted(self._waiting))  # the engine says why it takes nothing more

    async def generate(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> Completion:
        """See `engine.base`; it begins with the next round."""
        async with self._round(request):
            return await self._engine.generate(
                prompt, sampling, request=request, session=session, priority=priority
            )

    def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        """See `engine.base`. It is in no round, since its reader may be slow."""
        return self._engine.stream(prompt, sampling, request=request, session=session, priority=priority)

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """See `engine.base`."""
        return await self._engine.score(tokens, temperature=temperature)

    async def abort(self, requests: Sequence[str]) -> None:
        """See `engine.base`."""
        await self._let_in(requests)
        await self._engine.abort(requests)

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """See `engine.base`; what waits for a round counts as submitted."""
        self._paused = True
        await self._let_in(sorted(self._waiting))
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `engine.base`."""
        await self._engine.resume()
        self._paused = False

    async def update(
        self,
        state: Mapping[str, Any],
        version: PolicyVersion,
        probe: Probe | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> float:
        """See `engine.base`."""
        return await self._engine.update(state, version, probe, in_flight)

    async def health(self) -> Health:
        """See `engine.base`."""
        health = await self._engine.health()
        return replace(health, waiting=health.waiting + len(self._waiting))

    @asynccontextmanager
    async def _round(self, request: str) -> AsyncIterator[None]:
        """Wait for the next round, and be part of it until left."""
        taken = request in self._waiting or request in self._playing
        if self._player is None or self._paused or taken:
            yield  # for the engine to keep, or to say what is wrong
            return
        gate = self._waiting[request] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            await gate
            yield
        finally:
            self._waiting.pop(request, None)
            self._playing.discard(request)
            self._changed.set()

    async def _play(self) -> None:
        """Begin one round after the other."""
        while True:
            await self._settled()
            if self._waiting and not self._playing and len(self._waiting) >= self._present:
                requests = sorted(self._waiting)
                await self._let_in(requests)  # in this order they reach the engine
                continue
            await self._changed.wait()

    async def _let_in(self, requests: Sequence[str]) -> None:
        """Let those of `requests` that wait for a round reach the engine now."""
        for request in requests:
            gate = self._waiting.pop(request, None)
            if gate is not None and not gate.done():
                self._playing.add(request)
                gate.set_result(None)
        await asyncio.sleep(0)

    async def _settled(self) -> None:
        """Until nothing has changed for `SETTLED` turns of the event loop."""
        quiet = 0
        while quiet < SETTLED:
            self._changed.clear()
            await asyncio.sleep(0)
            quiet = 0 if self._changed.is_set() else quiet + 1
