"""Several engines behind one: each request goes where its prefix lies.

Role: one client over N replicas with the same weights, embedded or remote. Neighbours: agents see an
`Engine`; `routing` remembers prefixes. Invariants: which replica serves changes no token, because the noise
is keyed by request, seed and position, and a request keeps its id wherever it goes; a replica that isn't
ready, or has other weights than the last update's, gets no new traffic; a request of a replica that dies or
loses its weights is asked again elsewhere, from its prompt, each replica once at most. Not covered: a stream
whose first tokens are out goes on elsewhere only where the new replica repeats them (with the same weights it
does).

waits for: a replica · unblocked by: its answer, its death, the next probe
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from rollwright.clock import Clock, let_go
from rollwright.engine.base import Engine, Health, InFlight, PauseMode
from rollwright.engine.routing import Routing
from rollwright.engine.together import together
from rollwright.errors import ContextOverflow, EngineClosed, EngineError, WeightMismatch
from rollwright.events import Noted, Sink
from rollwright.types import Chunk, Completion, Finish, Floats, Ints, PolicyVersion, Probe, Sampling

PROBE_SECONDS = 5.0
"""How often replicas are asked how they are, so that one that is back gets traffic again."""

_OURS = (ContextOverflow, WeightMismatch, ValueError)
"""Errors that say something about the request or the weights, not about the replica."""


@dataclass(eq=False)
class _Replica:
    """One engine: what it has to do, and whether it may get more."""

    engine: Engine
    number: int
    flights: set[str] = field(default_factory=set)
    dead: str = ""
    """Why it gets no traffic."""
    unfit: bool = False
    """It has not the weights of the last update; the next good one mends it."""
    asleep: bool = False
    """It says itself that it isn't ready, though nobody paused it here."""
    last: Health | None = None


class Replicas:
    """`engines` as one. `slack` is how many requests more than the least busy replica has the one where the
    prefix lies may have, before the request goes to the least busy."""

    def __init__(self, engines: Sequence[Engine], clock: Clock, events: Sink, slack: int = 8) -> None:
        if not engines:
            raise ValueError("replicas: give at least one engine")
        self._replicas = [_Replica(engine, i) for i, engine in enumerate(engines)]
        self._events, self._clock = events, clock
        self._routing = Routing(slack)
        self._moved: set[str] = set()  # aborted here, to be asked again elsewhere
        self._probing: asyncio.Task[None] | None = None
        self._flying: dict[str, _Replica] = {}
        self._version: PolicyVersion | None = None
        self._paused: PauseMode | None = None
        self._closed = False

    async def start(self) -> None:
        """Start all; those that don't start get no traffic. Idempotent.

        Raises:
            EngineError: none starts.
        """
        self._check_open()
        await self._everywhere(lambda engine: engine.start())
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe())

    async def close(self) -> None:
        """Close all. Idempotent."""
        self._closed = True
        if self._probing is not None:
            await let_go(self._clock, self._probing)
        closed = (replica.engine.close() for replica in self._replicas)
        await asyncio.gather(*closed, return_exceptions=True)

    async def generate(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> Completion:
        """See `engine.base`; asked again elsewhere where a replica dies."""
        for replica in self._route(prompt, request, session):
            try:
                with self._placed(replica, request):
                    done = await replica.engine.generate(
                        prompt, sampling, request=request, session=session, priority=priority
                    )
            except EngineError as error:
                self._blame(replica, error)
                continue
            if done.finish is Finish.ABORT and request in self._moved:
                continue
            self._routing.remember(replica.number, np.concatenate([prompt, done.tokens]), session)
            return done
        raise self._nobody()

    async def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        """See `engine.base`. Where a replica dies under it, the next one begins again, and what is out
        already isn't said twice.

        Raises:
            EngineError: the next replica says something else than what is out.
        """
        out: list[int] = []
        for replica in self._route(prompt, request, session):
            begun = replica.engine.stream(
                prompt, sampling, request=request, session=session, priority=priority
            )
            try:
                with self._placed(replica, request):
                    async with aclosing(cast(Any, begun)) as chunks:
                        moved = False
                        async for chunk in _unsaid(chunks, list(out)):
                            moved = chunk.finish is Finish.ABORT and request in self._moved
                            if not moved:
                                out += chunk.tokens.tolist()
                                yield chunk
                if moved:
                    continue
            except EngineError as error:
                self._blame(replica, error)
                continue
            self._routing.remember(replica.number, np.concatenate([prompt, np.array(out, np.int32)]), session)
            return
        raise self._nobody()

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """See `engine.base`; by the least busy replica."""
        self._check_open()
        for replica in sorted(self._usable(), key=lambda each: len(each.flights)):
            try:
                return await replica.engine.score(tokens, temperature=temperature)
            except EngineError as error:
                self._blame(replica, error)
        raise self._nobody()

    async def abort(self, requests: Sequence[str]) -> None:
        """See `engine.base`."""
        asked = [(each, ours) for each in self._live() if (ours := each.flights.intersection(requests))]
        done = await asyncio.gather(
            *(replica.engine.abort(sorted(ours)) for replica, ours in asked), return_exceptions=True
        )
        for (replica, _), error in zip(asked, done, strict=True):
            if isinstance(error, EngineError):
                self._blame(replica, error)
            elif error is not None:
                raise error

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """See `engine.base`; all of them."""
        self._check_open()
        self._paused = mode
        await self._everywhere(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """See `engine.base`; all of them.

        Raises:
            WeightMismatch: no replica has the last update's weights.
        """
        self._check_open()
        if all(replica.unfit or replica.dead for replica in self._replicas):
            raise WeightMismatch("no replica has the weights of the last update: update with matching ones")
        await self._everywhere(lambda engine: engine.resume(), fit=True)
        self._paused = None
        for replica in self._replicas:
            replica.asleep = False

    async def update(
        self,
        state: Mapping[str, Any],
        version: PolicyVersion,
        probe: Probe | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> float:
        """See `engine.base`; to all, the largest difference of any. A replica that refuses gets no traffic
        until an update succeeds there; where all refuse, so does this.

        Raises:
            WeightMismatch: none took them, or they fit none.
        """
        self._check_open()
        live, before = self._live(), [replica for replica in self._live() if replica.unfit]
        gathered = await asyncio.gather(
            *(replica.engine.update(state, version, probe, in_flight) for replica in live),
            return_exceptions=True,
        )
        taken, refused = self._sorted(live, gathered, version)
        if not taken:
            raise refused[0] if refused else self._nobody()
        self._version = version
        self._routing.forget()
        for replica in live:
            if replica.unfit:
                await self._move(replica)
            elif replica in before and self._paused is None:
                await replica.engine.resume()
        return max(taken)

    def _sorted(
        self, live: Sequence[_Replica], gathered: Sequence[Any], version: PolicyVersion
    ) -> tuple[list[float], list[WeightMismatch]]:
        """The gaps of those that took an update, and what the others said; all are marked."""
        taken: list[float] = []
        refused: list[WeightMismatch] = []
        for replica, found in zip(live, gathered, strict=True):
            replica.unfit = isinstance(found, WeightMismatch)
            if isinstance(found, WeightMismatch):
                refused.append(found)
                self._tell(replica, f"gets no traffic: it refused the weights of {version}: {found}")
            elif isinstance(found, EngineError):
                self._blame(replica, found)
            elif isinstance(found, BaseException):
                raise found
            else:
                taken.append(found)
        return taken, refused

    async def _move(self, replica: _Replica) -> None:
        """What the replica holds is asked again elsewhere."""
        names = list(replica.flights)
        self._moved.update(names)
        await replica.engine.abort(names)

    async def health(self) -> Health:
        """All together: sums of counters; rates are those of the slowest, version the oldest that serves.
        Also asks those that were thought dead, so that one that is back gets traffic again."""
        gathered = await asyncio.gather(
            *(replica.engine.health() for replica in self._replicas), return_exceptions=True
        )
        for replica, found in zip(self._replicas, gathered, strict=True):
            if isinstance(found, Health):
                self._seen(replica, found)
            elif isinstance(found, EngineError):
                self._blame(replica, found)
            elif isinstance(found, BaseException):
                raise found
        known = [replica.last for replica in self._replicas if replica.last is not None]
        if not known:
            raise self._nobody()
        fit = [replica.last for replica in self._live() if not replica.unfit and replica.last is not None]
        summed = together(known, fit)
        return replace(summed, ready=summed.ready and not self._closed)

    def _seen(self, replica: _Replica, found: Health) -> None:
        """What a replica says of itself decides whether one that was dead is back."""
        replica.last = found
        if replica.dead and found.ready:
            self._tell(replica, "is back")
            replica.dead = ""
            replica.unfit = replica.unfit or (self._version is not None and found.version != self._version)
        if self._paused is None:
            replica.asleep = not found.ready

    def _route(self, prompt: Ints, request: str, session: str) -> Iterator[_Replica]:
        """The replicas to ask, in order: each at most once, chosen when it is its turn.

        Raises:
            ValueError: `request` is in flight already.
        """
        self._check_open()
        if request in self._flying:
            raise ValueError(
                f"request {request!r} is in flight already; ids are unique among those in flight"
            )
        tried: set[int] = set()
        self._moved.discard(request)
        while left := [each for each in self._usable() if each.number not in tried]:
            replica = self._best(left, prompt, session)
            tried.add(replica.number)
            yield replica
            self._check_open()

    def _best(self, among: Sequence[_Replica], prompt: Ints, session: str) -> _Replica:
        load = {each.number: len(each.flights) for each in among}
        number = self._routing.choose(load, prompt, session)
        return next(each for each in among if each.number == number)

    @contextmanager
    def _placed(self, replica: _Replica, request: str) -> Iterator[None]:
        self._flying[request] = replica
        replica.flights.add(request)
        try:
            yield
        finally:
            replica.flights.discard(request)
            self._flying.pop(request, None)

    def _live(self) -> list[_Replica]:
        return [replica for replica in self._replicas if not replica.dead]

    def _usable(self) -> list[_Replica]:
        """Those that get traffic; all that live where none is fit, because they hold what comes until they
        are."""
        live = self._live()
        fit = [replica for replica in live if not replica.unfit]
        return [replica for replica in fit if not replica.asleep] or fit or live

    async def _probe(self) -> None:
        while True:
            await self._clock.sleep(PROBE_SECONDS)
            with suppress(EngineError):  # told when it was found
                await self.health()

    def _blame(self, replica: _Replica, error: EngineError) -> None:
        """The replica gets nothing more, unless the error is the request's or our own end.

        Raises:
            EngineError: then.
        """
        if isinstance(error, _OURS) or self._closed:
            raise error
        if not replica.dead:
            replica.dead = str(error)
            self._tell(replica, f"gets no traffic: {error}")

    def _nobody(self) -> EngineError:
        told = "; ".join(f"{each.number}: {each.dead or 'was tried'}" for each in self._replicas)
        return EngineClosed(f"no replica answers ({told})")

    def _tell(self, replica: _Replica, text: str) -> None:
        self._events.emit(Noted(level="warning", text=f"replica {replica.number} {text}"))

    async def _everywhere(
        self, call: Callable[[Engine], Coroutine[Any, Any, None]], *, fit: bool = False
    ) -> None:
        """`call` each that lives, at once; those with the right weights only where `fit`.

        Raises:
            EngineError: none of them did it.
        """
        asked = [each for each in self._replicas if not each.dead and not (fit and each.unfit)]
        done = await asyncio.gather(*(call(each.engine) for each in asked), return_exceptions=True)
        for replica, error in zip(asked, done, strict=True):
            if isinstance(error, EngineError):
                self._blame(replica, error)
            elif error is not None:
                raise error
        if all(replica.dead for replica in self._replicas):
            raise self._nobody()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine takes nothing more: it was closed")


async def _unsaid(chunks: AsyncIterator[Chunk], said: list[int]) -> AsyncIterator[Chunk]:
    """`chunks` without the tokens that are out already.

    Raises:
        EngineError: they begin otherwise.
    """
    async for chunk in chunks:
        known = min(len(said), len(chunk.tokens))
        if said[:known] != chunk.tokens[:known].tolist():
            raise _Contradicts("a replica died under a stream, and the next one does not repeat its tokens")
        del said[:known]
        if known == 0 or chunk.finish is not None or known < len(chunk.tokens):
            yield replace(chunk, tokens=chunk.tokens[known:], logprobs=chunk.logprobs[known:])


class _Contradicts(EngineError, ValueError):
    """Not the replica's fault, and no other would do better."""
