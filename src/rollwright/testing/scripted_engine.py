"""An engine that says what it is told: the fake of the engine seam, without a model.

Role: tests of agents, factory and conductor. Neighbours: `testing.engines` holds it to the same suite as
real engines. Invariant: it does all the protocol does (streams, pauses, aborts, versions, cache counts),
one token per turn of the event loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from rollwright.engine.base import Health, InFlight, PauseMode
from rollwright.errors import ContextOverflow, EngineClosed, WeightMismatch
from rollwright.types import (
    Chunk,
    Completion,
    Finish,
    Floats,
    Ints,
    PolicyVersion,
    Probe,
    Sampling,
    VersionSpan,
)

Script = Callable[[tuple[int, ...]], tuple[Sequence[int], Sequence[float]]]
"""Prompt → the tokens of the completion and their logprobs. A completion that doesn't end with a stop token
ends with `Finish.LENGTH`."""

UNSAID = -20.0
"""Logprob that `score` gives to a token the script would not say."""

WEIGHTS = "script"
"""The one name in the state that `update` takes: `{WEIGHTS: another script}`."""


class _Mode(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"


@dataclass(eq=False)
class _Flight:
    """A request: what was said, what is still to be said under `version`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    held: bool
    streamed: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    plan: list[tuple[int, float]] = field(default_factory=list)
    planned: PolicyVersion | None = None
    cached: int = 0
    aborted: bool = False


class ScriptedEngine:
    """Says what `script` says. `vocab` and `context` bound what it takes."""

    def __init__(
        self, script: Script, *, version: PolicyVersion, vocab: int = 1 << 16, context: int = 4096
    ) -> None:
        self._script, self._version = script, version
        self._vocab, self._context = vocab, context
        self._flights: dict[str, _Flight] = {}
        self._seen: list[tuple[int, ...]] = []
        self._mode, self._unfit = _Mode.SERVING, False
        self._started = self._closed = False
        self._changed = asyncio.Event()
        self._prompt_tokens = self._cached_tokens = self._sampled = 0
        self.requests: list[tuple[str, tuple[int, ...], Sampling]] = []
        """Every request taken, in order: name, prompt, sampling."""

    async def start(self) -> None:
        self._check_open()
        self._started = True
        self._signal()

    async def close(self) -> None:
        self._closed = True
        self._signal()

    async def generate(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> Completion:
        flight = self._enter(prompt, sampling, request, streamed=False)
        try:
            async for chunk in self._say(flight, request):
                finish = chunk.finish
        finally:
            self._leave(request)
        assert finish is not None, "the last chunk has a finish"
        return Completion(
            request=request,
            tokens=np.array(flight.tokens, np.int32),
            logprobs=np.array(flight.logprobs, np.float32),
            spans=_spans(flight.versions),
            finish=finish,
            prompt_tokens=len(flight.prompt),
            cached=flight.cached,
        )

    async def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        flight = self._enter(prompt, sampling, request, streamed=True)
        try:
            async for chunk in self._say(flight, request):
                yield chunk
        finally:
            self._leave(request)

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """Token by token what the script would say next; `temperature` changes nothing."""
        self._check_open()
        ids, found = tuple(self._checked(tokens)), []
        for i in range(1, len(ids)):
            said, logprobs = self._script(ids[:i])
            found.append(logprobs[0] if said and said[0] == ids[i] else UNSAID)
        return np.array(found, np.float32)

    async def abort(self, requests: Sequence[str]) -> None:
        for name in requests:
            if name in self._flights:
                self._flights[name].aborted = True
        self._signal()

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        self._check_open()
        if mode is PauseMode.ABORT:
            await self.abort([name for name, flight in self._flights.items() if not flight.held])
        waits = mode is PauseMode.WAIT and self._mode is not _Mode.PAUSED
        self._mode = _Mode.DRAINING if waits else _Mode.PAUSED
        self._signal()
        while self._mode is _Mode.DRAINING and not self._closed:
            if all(flight.held for flight in self._flights.values()):
                self._mode = _Mode.PAUSED
                return
            await self._changed.wait()

    async def resume(self) -> None:
        self._check_open()
        if self._unfit:
            raise WeightMismatch("cannot resume: the last update failed; update with a matching script first")
        self._mode = _Mode.SERVING
        for flight in self._flights.values():
            flight.held = False
        self._signal()

    async def update(
        self,
        state: Mapping[str, Any],
        version: PolicyVersion,
        probe: Probe | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> float:
        """Take another script, as `{WEIGHTS: script}`."""
        self._check_open()
        gap = float("inf")
        if state.keys() == {WEIGHTS}:
            self._script, self._version = state[WEIGHTS], version
            self._seen.clear()
            self._interrupt(in_flight)
            own = await self.score(probe.tokens) if probe is not None else None
            gap = 0.0 if probe is None or own is None else float(np.abs(own - probe.logprobs).max())
        self._unfit = not gap <= 1e-4
        if self._unfit:
            self._mode = _Mode.PAUSED
            self._signal()
            raise WeightMismatch(
                f"expected a state {{{WEIGHTS!r}: script}} within 1e-4 of the probe, got {gap}"
            )
        self._signal()
        return gap

    async def health(self) -> Health:
        """Counters; no time is measured, so busy and idle seconds stay 0."""
        held = sum(flight.held for flight in self._flights.values())
        return Health(
            ready=self._started and not self._closed and self._mode is _Mode.SERVING,
            version=self._version,
            running=len(self._flights) - held,
            waiting=held,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sampled_tokens=self._sampled,
            steps=self._sampled,
            busy_seconds=0.0,
            idle_seconds=0.0,
            kv_tokens=sum(map(len, self._seen)),
            kv_capacity=1 << 62,
        )

    def _enter(self, prompt: Ints, sampling: Sampling, name: str, *, streamed: bool) -> _Flight:
        self._check_open()
        ids = tuple(self._checked(prompt))
        if name in self._flights:
            raise ValueError(f"request {name!r} is in flight already")
        if len(ids) >= self._context:
            raise ContextOverflow(f"a prompt of {len(ids)} tokens fills the context of {self._context}")
        flight = _Flight(ids, sampling, held=self._mode is not _Mode.SERVING, streamed=streamed)
        self._flights[name] = flight
        self.requests.append((name, ids, sampling))
        return flight

    def _interrupt(self, in_flight: InFlight) -> None:
        """Do to those that have said something what `in_flight` says."""
        for flight in self._flights.values():
            if not flight.tokens or in_flight is InFlight.CONTINUE:
                continue
            if in_flight is InFlight.STOP or flight.streamed:
                flight.aborted = True
                continue
            for said in (flight.tokens, flight.logprobs, flight.versions, flight.plan):
                said.clear()

    def _leave(self, name: str) -> None:
        self._flights.pop(name, None)
        self._signal()

    async def _say(self, flight: _Flight, name: str) -> AsyncIterator[Chunk]:
        while True:
            self._check_open()
            while not flight.aborted and self._frozen(flight):
                await self._changed.wait()
                self._check_open()
            if flight.aborted:
                yield self._chunk(name, [], [], Finish.ABORT)
                return
            finish = self._next(flight)
            yield self._chunk(name, flight.tokens[-1:], flight.logprobs[-1:], finish)
            if finish is not None:
                self._seen.append((*flight.prompt, *flight.tokens[:-1]))
                return
            await asyncio.sleep(0)

    def _next(self, flight: _Flight) -> Finish | None:
        """Say one more token."""
        if flight.planned is None:
            flight.cached = max((_common(flight.prompt[:-1], seen) for seen in self._seen), default=0)
            self._prompt_tokens += len(flight.prompt)
            self._cached_tokens += flight.cached
        if flight.planned != self._version:
            said = self._script((*flight.prompt, *flight.tokens))
            flight.plan, flight.planned = list(zip(*said, strict=True)), self._version
            if not flight.plan:
                raise ValueError(
                    f"the script said nothing to {len(flight.prompt)} tokens; it must say one at least"
                )
        token, logprob = flight.plan.pop(0)
        flight.tokens.append(token)
        flight.logprobs.append(logprob)
        flight.versions.append(self._version)
        self._sampled += 1
        if token in flight.sampling.stop:
            return Finish.STOP
        full = len(flight.prompt) + len(flight.tokens) >= self._context
        spent = len(flight.tokens) >= flight.sampling.max_tokens
        return Finish.LENGTH if full or spent or not flight.plan else None

    def _chunk(
        self, name: str, tokens: Sequence[int], logprobs: Sequence[float], finish: Finish | None
    ) -> Chunk:
        return Chunk(
            request=name,
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            version=self._version,
            finish=finish,
        )

    def _frozen(self, flight: _Flight) -> bool:
        return not self._started or flight.held or self._mode is _Mode.PAUSED

    def _checked(self, tokens: Ints) -> list[int]:
        ids = [int(i) for i in tokens]
        if not ids or min(ids) < 0 or max(ids) >= self._vocab:
            raise ValueError(f"expected at least one id in 0 … {self._vocab - 1}, got {ids[:8]}")
        return ids

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the scripted engine was closed")

    def _signal(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _spans(versions: Sequence[PolicyVersion]) -> tuple[VersionSpan, ...]:
    cuts = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
    edges = [0, *cuts, len(versions)]
    return tuple(VersionSpan(version=versions[a], start=a, end=b) for a, b in pairwise(edges) if b > a)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
