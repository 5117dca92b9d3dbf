"""An engine in another process: the `Engine` protocol over the token endpoint of `rollwright serve`.

Role: what a run or an evaluation uses where the policy is served elsewhere. Neighbours: `link` speaks HTTP,
`flight` is one request. Invariants: ids, logprobs, spans and errors are those of the engine behind the
server; a request is known to the server before `pause` is, so that calls take effect in their order; a server
that dies or hangs ends every request with an error, within `silence` seconds. Not covered: `cached`
and `compliant` of streamed requests (a `Chunk` has no place for them).

waits for: the server's answers · unblocked by: each answer, the server's death, `silence`, a revoked lease
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from rollwright.clock import Clock, let_go, within
from rollwright.engine.base import Health, InFlight, PauseMode
from rollwright.engine.remote.address import Address
from rollwright.engine.remote.flight import Flight
from rollwright.engine.remote.link import Link, Unreached
from rollwright.engine.serve.weights import WeightsFolder
from rollwright.engine.serve.wire import (
    AbortRequest,
    Done,
    Generated,
    GenerateRequest,
    PauseRequest,
    SamplingParams,
    ScoreRequest,
    Scores,
    UpdateRequest,
    chunk,
    completion,
)
from rollwright.errors import DeadlineExceeded, EngineClosed, EngineError, RollwrightError
from rollwright.events import Noted, Sink
from rollwright.pool.base import Lease
from rollwright.types import Chunk, Completion, Floats, Ints, PolicyVersion, Probe, Sampling

LEAVE_SECONDS = 5.0
"""How long a request that its caller leaves may take to end on the server."""


class RemoteEngine:
    """The engine behind `address`. New weights go through `folder`, which the server reads too."""

    def __init__(
        self,
        address: Address,
        clock: Clock,
        events: Sink,
        *,
        folder: Path | None = None,
        silence: float = 30.0,
        patience: float = 30.0,
        lease: Lease | None = None,
    ) -> None:
        self._address, self._clock, self._events, self._lease = address, clock, events, lease
        self._link = Link(address, clock, silence)
        self._weights = None if folder is None else WeightsFolder(folder)
        self._silence, self._patience = silence, patience
        self._owner = secrets.token_urlsafe(16)
        self._flights: dict[str, Flight] = {}
        self._stored = ""  # digest of the weights we put last, to be released with the next
        self._last: Health | None = None
        self._closed = ""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait, `patience` seconds at most, until the server answers. Idempotent.

        Raises:
            EngineClosed: closed before, or no server answers.
            EngineError: what answers isn't our server, or refuses the token.
        """
        self._check_open()
        self._link.open()
        since = self._clock.now()
        while True:
            try:
                await self.health()
                break
            except Unreached:
                if self._clock.now() - since > self._patience:
                    raise
                await self._clock.sleep(0.2)
        if self._lease is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch(self._lease))

    async def close(self) -> None:
        """Leave the server, which goes on; requests in flight raise `EngineClosed`. Idempotent."""
        self._stop("the engine was closed")
        flights = list(self._flights.values())
        await asyncio.gather(*(flight.stop() for flight in flights))
        if self._watching is not None and self._watching is not asyncio.current_task():
            await let_go(self._clock, self._watching)
        await self._link.close()

    async def generate(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> Completion:
        """See `engine.base`."""
        wire = self._request(prompt, sampling, request, session, priority, whole=True)
        async with self._flight(wire) as flight:
            async for data in flight.pieces():
                done = _read(Generated, data)
                found = completion(done.choices[0], done.prompt_tokens)
        return found

    async def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        """See `engine.base`."""
        wire = self._request(prompt, sampling, request, session, priority, whole=False)
        async with self._flight(wire) as flight, aclosing(cast(Any, flight.pieces())) as pieces:
            async for data in pieces:
                yield chunk(_read(Generated, data).choices[0])

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """See `engine.base`."""
        self._check_open()
        wire = ScoreRequest(token_ids=tuple(tokens.tolist()), temperature=temperature)
        found = _read(Scores, await self._link.post("/v1/score", wire, repeatable=True))
        return np.array(found.logprobs, np.float32)

    async def abort(self, requests: Sequence[str]) -> None:
        """See `engine.base`; only requests of this client end."""
        ours = [self._flights[name] for name in requests if name in self._flights]
        await self._known(ours)
        if ours:
            wire = AbortRequest(requests=tuple(flight.name for flight in ours), owner=self._owner)
            await self._link.post("/inference/v1/abort", wire, repeatable=True)

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """See `engine.base`. When it returns, the callers of what has ended have their answers."""
        self._check_open()
        before = list(self._flights.values())
        await self._known(before)
        done = _read(Done, await self._long("/control/v1/pause", PauseRequest(mode=mode.value)))
        ended = [flight for flight in before if flight.name not in done.held]
        with suppress(DeadlineExceeded):  # a caller that does not read is no reason to fail
            await within(
                self._clock,
                asyncio.gather(*(flight.left.wait() for flight in ended)),
                LEAVE_SECONDS,
                "what the pause ended",
            )

    async def resume(self) -> None:
        """See `engine.base`."""
        self._check_open()
        await self._link.post("/control/v1/resume", {}, control=True, repeatable=True)

    async def update(
        self,
        state: Mapping[str, Any],
        version: PolicyVersion,
        probe: Probe | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> float:
        """See `engine.base`.

        Raises:
            EngineError: there is no shared folder.
            StoreError: it cannot be written.
        """
        self._check_open()
        if self._weights is None:
            raise EngineError(
                "no way for weights to the server: give the engine a `weights` folder that both see"
            )
        digest = await asyncio.to_thread(self._weights.put, state)
        wire = UpdateRequest(
            digest=digest,
            version=version,
            probe_tokens=None if probe is None else tuple(probe.tokens.tolist()),
            probe_logprobs=None if probe is None else tuple(probe.logprobs.tolist()),
            in_flight=in_flight.value,
        )
        try:
            done = _read(Done, await self._long("/control/v1/update", wire))
        except BaseException:  # boundary: takes back what it stored and raises on
            self._weights.release(digest)
            raise
        if self._stored:
            self._weights.release(self._stored)
        self._stored = digest
        return float(done.gap)

    async def health(self) -> Health:
        """See `engine.base`; once closed, the last one, not ready."""
        if self._closed and self._last is not None:
            return replace(self._last, ready=False)
        self._last = _read(Health, await self._link.get("/health"))
        return self._last

    def _request(
        self, prompt: Ints, sampling: Sampling, name: str, session: str, priority: int, *, whole: bool
    ) -> GenerateRequest:
        self._check_open()
        if not name:
            raise ValueError("request: give it a name")
        return GenerateRequest(
            token_ids=tuple(prompt.tolist()),
            request_id=name,
            sampling_params=SamplingParams.of(sampling),
            session=session,
            priority=priority,
            stream=True,
            owner=self._owner,
            whole=whole,
        )

    @asynccontextmanager
    async def _flight(self, wire: GenerateRequest) -> AsyncIterator[Flight]:
        """A request under way, ended on the server too when its caller leaves early."""
        name = wire.request_id
        if name in self._flights:
            raise ValueError(f"request {name!r} is in flight already; ids are unique among those in flight")
        flight = self._flights[name] = Flight(self._link, wire)
        try:
            yield flight
        finally:
            try:
                if not flight.whole and not self._closed:
                    with suppress(RollwrightError, ValueError):  # then it went with the connection
                        await within(self._clock, self._leave(flight), LEAVE_SECONDS, f"the end of {name}")
                await flight.stop()
            finally:
                self._flights.pop(name, None)
                flight.left.set()

    async def _leave(self, flight: Flight) -> None:
        """Return when the server has forgotten the request."""
        await flight.accepted.wait()  # else the abort might come before what it ends
        wire = AbortRequest(requests=(flight.name,), owner=self._owner)
        await self._link.post("/inference/v1/abort", wire, repeatable=True)

    async def _known(self, flights: Sequence[Flight]) -> None:
        """The server knows these."""
        if flights:
            waits = asyncio.gather(*(flight.accepted.wait() for flight in flights))
            await within(self._clock, waits, self._silence, "the server's word that it took a request")

    async def _long(self, path: str, wire: Any) -> bytes:
        """A control call that may take long; every wait in it is bounded by the server's silence."""
        return await self._link.last(path, wire, control=True)

    async def _watch(self, lease: Lease) -> None:
        """As the embedded engine: end what is ours, take nothing more."""
        await lease.wait_revoked()
        self._events.emit(Noted(level="info", text=f"lease {lease.id} revoked: the engine stops"))
        with suppress(RollwrightError):
            await self.abort(list(self._flights))
        flights = list(self._flights.values())
        with suppress(DeadlineExceeded):
            await within(
                self._clock,
                asyncio.gather(*(flight.read.wait() for flight in flights)),
                LEAVE_SECONDS,
                "the end of what was aborted",
            )
        self._stop(f"lease {lease.id} was revoked")

    def _stop(self, reason: str) -> None:
        self._closed = self._closed or reason
        for flight in self._flights.values():
            flight.fail(EngineClosed(f"{self._closed} while the request waited"))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the engine takes nothing more: {self._closed}")


def _read(kind: type[Any], data: bytes) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"the server's answer is not one of ours: {error}") from error
