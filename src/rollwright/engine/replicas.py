"""Several engines behind one: each request goes where its prefix lies.

Role: one client over N replicas with the same weights, embedded or remote. Neighbours: agents see an
`Engine`; `routing` remembers prefixes. Invariants: which replica serves changes no token, because the noise
is keyed by request, seed and position, and a request keeps its id wherever it goes; a replica that isn't
ready, or has other weights than the last update's, gets no new traffic; a request of a replica that dies or
loses its weights is asked again elsewhere, from its prompt, each replica once at most; a failure that may be
the request's own fault, an engine that stopped in a step above all, is its caller's to hear and is tried
nowhere else; a replica that is full is no worse for it. Not covered: a stream whose first tokens are out goes
on elsewhere only where the new replica repeats them (with the same weights it does).

waits for: a replica · unblocked by: its answer, its death, the next probe · where all are full: the next try
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from rollwright.clock import Clock, let_go
from rollwright.engine.base import Engine, Health, InFlight, PauseMode
from rollwright.engine.replica import Replica
from rollwright.engine.routing import Routing
from rollwright.engine.search import AGAIN_SECONDS, BUSY_SECONDS, Search, nothing
from rollwright.engine.serve.desk import Busy
from rollwright.engine.together import together
from rollwright.engine.unsaid import unsaid
from rollwright.errors import ContextOverflow, EngineClosed, EngineError, WeightMismatch
from rollwright.events import Noted, Sink
from rollwright.types import Chunk, Completion, Finish, Floats, Ints, PolicyVersion, Probe, Sampling

PROBE_SECONDS = 5.0
"""How often replicas are asked how they are, so that one that is back gets traffic again."""

_OURS = (ContextOverflow, WeightMismatch, ValueError, Busy)
"""Errors after which a replica is what it was."""


class Replicas:
    """`engines` as one. `slack` is how many requests more than the least busy replica has the one where the
    prefix lies may have, before the request goes to the least busy."""

    def __init__(self, engines: Sequence[Engine], clock: Clock, events: Sink, slack: int = 8) -> None:
        if not engines:
            raise ValueError("replicas: give at least one engine")
        self._replicas = [Replica(engine, i) for i, engine in enumerate(engines)]
        self._events, self._clock = events, clock
        self._routing = Routing(slack)
        self._moved: set[str] = set()  # aborted here, to be asked again elsewhere
        self._probing: asyncio.Task[None] | None = None
        self._searches: dict[str, Search] = {}  # of the requests in flight
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
        with self._search(request) as search:
            while replica := await self._next(search, prompt, session):
                try:
                    with self._placed(replica, request):
                        done = await replica.engine.generate(
                            prompt, sampling, request=request, session=session, priority=priority
                        )
                except EngineError as error:
                    self._failed(search, replica, error)
                    continue
                if done.finish is Finish.ABORT and request in self._moved:
                    continue
                self._routing.remember(replica.number, np.concatenate([prompt, done.tokens]), session)
                return done
        return nothing(request, len(prompt))

    async def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        """See `engine.base`. Where a replica dies under it, the next one begins again, and what is out
        already isn't said twice.

        Raises:
            EngineError: the next replica says something else than what is out.
        """
        out: list[int] = []
        with self._search(request) as search:
            while replica := await self._next(search, prompt, session):
                begun = replica.engine.stream(
                    prompt, sampling, request=request, session=session, priority=priority
                )
                try:
                    with self._placed(replica, request):
                        async with aclosing(cast(Any, begun)) as chunks:
                            moved = False
                            async for chunk in unsaid(chunks, list(out)):
                                moved = chunk.finish is Finish.ABORT and request in self._moved
                                if not moved:
                                    out += chunk.tokens.tolist()
                                    yield chunk
                    if moved:
                        continue
                except EngineError as error:
                    self._failed(search, replica, error)
                    continue
                self._routing.remember(
                    replica.number, np.concatenate([prompt, np.array(out, np.int32)]), session
                )
                return
            yield Chunk(
                request=request,
                tokens=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                version=(await self.health()).version,
                finish=Finish.ABORT,
            )

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """See `engine.base`; by the least busy replica."""
        search = Search(until=self._clock.now() + BUSY_SECONDS)
        while replica := await self._next(search):
            try:
                return await replica.engine.score(tokens, temperature=temperature)
            except EngineError as error:
                self._failed(search, replica, error)
        raise self._nobody()

    async def abort(self, requests: Sequence[str]) -> None:
        """See `engine.base`."""
        for name in self._searches.keys() & requests:
            self._searches[name].aborted = True
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
        self, live: Sequence[Replica], gathered: Sequence[Any], version: PolicyVersion
    ) -> tuple[list[float], list[EngineError]]:
        """The gaps of those that took an update, and what the others said; all are marked."""
        taken: list[float] = []
        refused: list[EngineError] = []
        for replica, found in zip(live, gathered, strict=True):
            replica.unfit = isinstance(found, WeightMismatch | Busy)
            if isinstance(found, WeightMismatch | Busy):
                refused.append(found)
                self._tell(replica, f"gets no traffic: it refused the weights of {version}: {found}")
            elif isinstance(found, EngineError):
                self._blame(replica, found)
            elif isinstance(found, BaseException):
                raise found
            else:
                taken.append(found)
        return taken, refused

    async def _move(self, replica: Replica) -> None:
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
                if not isinstance(found, Busy):  # that one lives
                    self._blame(replica, found)
            elif isinstance(found, BaseException):
                raise found
        known = [replica.last for replica in self._replicas if replica.last is not None]
        if not known:
            raise self._nobody()
        fit = [replica.last for replica in self._live() if not replica.unfit and replica.last is not None]
        summed = together(known, fit)
        return replace(summed, ready=summed.ready and not self._closed)

    def _seen(self, replica: Replica, found: Health) -> None:
        """What a replica says of itself decides whether one that was dead is back."""
        replica.last = found
        if replica.dead and found.ready:
            self._tell(replica, "is back")
            replica.dead = ""
            replica.unfit = replica.unfit or (self._version is not None and found.version != self._version)
        if self._paused is None:
            replica.asleep = not found.ready

    @contextmanager
    def _search(self, request: str) -> Iterator[Search]:
        """That of `request`, which is in flight until this is left.

        Raises:
            ValueError: it is in flight already.
        """
        self._check_open()
        if request in self._searches:
            raise ValueError(
                f"request {request!r} is in flight already; ids are unique among those in flight"
            )
        self._moved.discard(request)
        search = self._searches[request] = Search(until=self._clock.now() + BUSY_SECONDS)
        try:
            yield search
        finally:
            del self._searches[request]

    async def _next(self, search: Search, prompt: Ints | None = None, session: str = "") -> Replica | None:
        """The replica to ask next, chosen now: each once, and the full ones again after a while. None where
        the request was aborted before any took it.

        Raises:
            Busy: those that live were full for too long.
            EngineClosed: none lives.
        """
        while not search.aborted:
            self._check_open()
            if left := [each for each in self._usable() if each.number not in search.tried]:
                replica = self._best(left, prompt, session)
                search.tried.add(replica.number)
                return replica
            if search.full is None:
                raise self._nobody()
            if self._clock.now() >= search.until:
                raise search.full
            await self._clock.sleep(AGAIN_SECONDS)
            search.again()
        return None

    def _failed(self, search: Search, replica: Replica, error: EngineError) -> None:
        """What a replica's error means for a request: it is gone or full, and another one may answer.

        Raises:
            EngineError: the request is to blame, or may be.
        """
        if self._closed or not isinstance(error, EngineClosed | Busy):
            raise error
        if isinstance(error, Busy):
            search.turned_away(replica.number, error)
        else:
            self._blame(replica, error)

    def _best(self, among: Sequence[Replica], prompt: Ints | None, session: str) -> Replica:
        load = {each.number: len(each.flights) for each in among}
        if prompt is None:
            return min(among, key=lambda each: load[each.number])
        number = self._routing.choose(load, prompt, session)
        return next(each for each in among if each.number == number)

    @contextmanager
    def _placed(self, replica: Replica, request: str) -> Iterator[None]:
        replica.flights.add(request)
        try:
            yield
        finally:
            replica.flights.discard(request)

    def _live(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.dead]

    def _usable(self) -> list[Replica]:
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

    def _blame(self, replica: Replica, error: EngineError) -> None:
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

    def _tell(self, replica: Replica, text: str) -> None:
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
