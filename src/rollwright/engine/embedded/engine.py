"""The embedded engine: the asynchronous shell around scheduler and model.

Role: implements `engine.base.Engine` in the event loop's own thread. Neighbours: agents and evaluations
call it, the conductor pushes weights, the pool may take its lease back. Invariants: one scheduler step per
turn of the event loop, so callers run between steps and never during one; weights change only between
steps; weights that miss their probe serve nothing until good ones arrive; every request ends: with a
completion, an error, or its caller's cancellation.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollwright.clock import Clock
from rollwright.engine.base import Health, InFlight, PauseMode
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.request import Request, Sink
from rollwright.engine.embedded.sampler import noise_key
from rollwright.engine.embedded.scheduler import Scheduler
from rollwright.engine.embedded.step import score
from rollwright.engine.embedded.watchers import Watchers
from rollwright.errors import ContextOverflow, EngineClosed, EngineError, WeightMismatch
from rollwright.events import Noted
from rollwright.events import Sink as Events
from rollwright.model.base import Model, Vocabulary
from rollwright.pool.base import Lease
from rollwright.types import Chunk, Completion, Finish, Floats, Ints, PolicyVersion, Probe, Sampling

PROBE_TOLERANCE = 1e-4
"""Largest difference of a logprob, in nats, between the trainer's probe and this engine."""


MOST = 1e6
"""Highest temperature; all tokens are as likely as each other far below it."""
STOPS = 256
"""Most stop ids of a request."""


class _Mode(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"


class EmbeddedEngine:
    """Serves `model`, whose weights are `version`. With a `lease` it stops when the lease is revoked:
    running requests end with `Finish.ABORT`, later ones are refused with `EngineClosed`."""

    def __init__(
        self,
        model: Model,
        config: EmbeddedConfig,
        version: PolicyVersion,
        clock: Clock,
        events: Events,
        lease: Lease | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._model, self._clock, self._events, self._lease = model, clock, events, lease
        self._scheduler = Scheduler(model, config, version, clock)
        self._watchers = Watchers(vocabulary)
        self._flying: dict[str, Request] = {}
        self._held: list[Request] = []  # came while paused
        self._mode = _Mode.SERVING
        self._unfit = ""  # why these weights may not serve
        self._closed = ""  # why it stopped
        self._wake, self._quiet = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._busy = self._idle = 0.0
        self._idle_since: float | None = None

    async def start(self) -> None:
        """Begin serving. Idempotent; a closed engine stays closed."""
        self._check_open()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._serve())]
            if self._lease is not None:
                self._tasks.append(asyncio.create_task(self._watch(self._lease)))

    async def close(self) -> None:
        """Stop; requests in flight raise `EngineClosed`. Idempotent."""
        self._stop("the engine was closed", EngineClosed("the engine was closed while the request waited"))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> Completion:
        """See `engine.base.Engine.generate`. `session` needs no routing here: there is one cache."""
        entry = self._submit(prompt, sampling, request, None, priority)
        try:
            return await entry.result
        finally:
            self._forget(entry)

    async def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        """As `generate`, token by token; closing the iterator frees everything."""
        sink: Sink = asyncio.Queue()
        entry = self._submit(prompt, sampling, request, sink, priority)
        try:
            while True:
                chunk = await sink.get()
                if chunk is None:
                    await entry.result
                    return
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._forget(entry)

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """float32[T-1], computed without the cache; also while paused.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or a temperature that is not above 0.
            ContextOverflow: T exceeds the context.
        """
        self._check_open()
        ids = self._checked(tokens)
        if not temperature > 0:
            raise ValueError(
                f"score needs a temperature above 0, got {temperature}; greedy logprobs are at 1"
            )
        if self._unfit:
            raise WeightMismatch(f"cannot score: {self._unfit}; update with matching weights first")
        if len(ids) > self._model.shape.context:
            raise ContextOverflow(f"{len(ids)} tokens exceed the context of {self._model.shape.context}")
        return score(self._scheduler.model, ids, temperature) if len(ids) > 1 else np.empty(0, np.float32)

    async def abort(self, requests: Sequence[str]) -> None:
        """End these with `Finish.ABORT`; unknown ids are ignored."""
        for name in requests:
            if name in self._flying:
                self._abort(self._flying[name])

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop generating; returns once nothing runs. `WAIT` finishes everything submitted before the call,
        a later call with another mode cuts that short."""
        self._check_open()
        if mode is PauseMode.ABORT:
            for entry in list(self._flying.values()):
                if entry not in self._held:
                    self._abort(entry)
        if mode is not PauseMode.WAIT or self._mode is _Mode.PAUSED or self._scheduler.idle:
            self._mode = _Mode.PAUSED
            self._quiet.set()
            return
        if self._mode is _Mode.SERVING:
            self._mode = _Mode.DRAINING
            self._quiet.clear()
        await self._quiet.wait()
        self._check_open()
        if self._mode is not _Mode.PAUSED:
            raise EngineError("the engine did not pause: somebody resumed it while requests were finished")

    async def resume(self) -> None:
        """Go on. Idempotent.

        Raises:
            WeightMismatch: the last update failed; only a good one makes the engine fit to serve.
        """
        self._check_open()
        if self._unfit:
            raise WeightMismatch(f"cannot resume: {self._unfit}; update with matching weights first")
        self._mode = _Mode.SERVING
        for entry in self._held:
            self._scheduler.add(entry)
        self._held.clear()
        self._quiet.set()
        self._wake.set()

    async def update(
        self,
        state: Mapping[str, Any],
        version: PolicyVersion,
        probe: Probe | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> float:
        """Take new weights, at once: callers run between steps. Tensors that are the model's own (coupled
        mode) aren't copied.

        Raises:
            WeightMismatch: see `engine.base.Engine.update`; `resume` raises too until an update succeeds.
        """
        self._check_open()
        try:
            try:
                self._load(state)
                self._scheduler.adopt(version, in_flight)
                gap = self._gap(probe)
            except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
                raise WeightMismatch(f"not weights of this model, or no probe of them: {error}") from error
        except WeightMismatch as error:
            self._unfit = str(error)
            self._mode = _Mode.PAUSED
            self._quiet.set()
            self._events.emit(Noted(level="error", text=f"weights of {version} refused: {error}"))
            raise
        self._unfit = ""
        self._wake.set()
        return gap

    async def health(self) -> Health:
        """Counters and state; cheap."""
        scheduler, histories = self._scheduler, self._scheduler.histories
        idle = self._idle if self._idle_since is None else self._idle + self._clock.now() - self._idle_since
        return Health(
            ready=bool(self._tasks) and not self._closed and not self._unfit and self._mode is _Mode.SERVING,
            version=scheduler.version,
            running=len(scheduler.batch),
            waiting=len(scheduler.waiting) + len(self._held),
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            sampled_tokens=scheduler.sampled_tokens,
            steps=scheduler.steps,
            busy_seconds=self._busy,
            idle_seconds=idle,
            kv_tokens=histories.tokens,
            kv_capacity=histories.radix.capacity + histories.kv.rows * histories.row_tokens,
            kv_bytes=histories.bytes,
            host_tokens=histories.radix.host_tokens,
            retracted=scheduler.retracted,
            constrained=scheduler.constrained,
            compliant=scheduler.compliant,
            rate=scheduler.pace.rate,
            rate_variation=scheduler.pace.rate_variation,
            gap_p99=scheduler.pace.gap_p99,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a request or a KV slot was lost; for tests."""
        self._scheduler.check_integrity()

    async def _serve(self) -> None:
        """One step per turn of the event loop; waits while there is nothing to run."""
        while not self._closed:
            if self._mode is _Mode.DRAINING and self._scheduler.idle:
                self._mode = _Mode.PAUSED
                self._quiet.set()
            began = self._clock.now()
            if self._mode is _Mode.PAUSED or self._scheduler.idle:
                self._idle_since = began
                self._wake.clear()
                await self._wake.wait()
                self._idle_since = None
                self._idle += self._clock.now() - began
                continue
            try:
                self._scheduler.run()
            except Exception as error:  # boundary: whatever breaks a step ends every request with its cause
                self._events.emit(Noted(level="error", text=f"the engine stopped: {error}"))
                failure = EngineError(f"the engine stopped in a step: {error}")
                failure.__cause__ = error
                self._stop(str(failure), failure)
                return
            self._busy += self._clock.now() - began
            await asyncio.sleep(0)

    async def _watch(self, lease: Lease) -> None:
        """Stop when the lease is wanted back: the tokens so far are returned, nothing new is taken."""
        await lease.wait_revoked()
        self._events.emit(Noted(level="info", text=f"lease {lease.id} revoked: the engine stops"))
        for entry in list(self._flying.values()):
            self._abort(entry)
        reason = f"lease {lease.id} was revoked"
        self._stop(reason, EngineClosed(reason))

    def _submit(
        self, prompt: Ints, sampling: Sampling, name: str, sink: Sink | None, priority: int
    ) -> Request:
        self._check_open()
        ids, context = self._checked(prompt), self._model.shape.context
        if name in self._flying:
            raise ValueError(f"request {name!r} is in flight already; ids are unique among those in flight")
        _check(sampling, priority)
        if len(ids) >= context:
            raise ContextOverflow(
                f"a prompt of {len(ids)} tokens leaves no room for one token in a context of {context}"
            )
        if len(ids) >= self._scheduler.longest:
            raise ContextOverflow(
                f"a prompt of {len(ids)} tokens is more than the {self._scheduler.longest} whose KV may be "
                "kept: raise engine.kv_tokens"
            )
        limit = min(len(ids) + sampling.max_tokens, context, self._scheduler.longest)
        watch = self._watchers.of(sampling, limit - len(ids))
        entry = Request(
            id=name,
            tokens=ids,
            sampling=sampling,
            noise=noise_key(sampling.seed, name),
            limit=limit,
            result=asyncio.get_running_loop().create_future(),
            sink=sink,
            prompt=len(ids),
            priority=priority,
            watch=watch,
        )
        entry.begin()
        self._flying[name] = entry
        if entry.matcher is not None and entry.matcher.ended:  # nothing can be said
            self._scheduler.end(entry, Finish.STOP)
        elif self._mode is _Mode.SERVING:
            self._scheduler.add(entry)
            self._wake.set()
        else:
            self._held.append(entry)
        return entry

    def _checked(self, tokens: Ints) -> Ints:
        given = np.asarray(tokens)
        if given.ndim != 1 or len(given) == 0:
            raise ValueError(f"expected at least one token id in one dimension, got shape {given.shape}")
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= self._model.vocab:
            raise ValueError(f"token ids are 0 … {self._model.vocab - 1}, got {low} … {high}")
        return np.ascontiguousarray(given, np.int32)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the engine takes nothing more: {self._closed}")

    def _forget(self, entry: Request) -> None:
        """The caller is gone; what still runs for it (it was cancelled) is freed."""
        if self._flying.get(entry.id) is entry:
            del self._flying[entry.id]
            if entry in self._held:
                self._held.remove(entry)
            self._scheduler.end(entry, None)
            self._wake.set()

    def _abort(self, entry: Request) -> None:
        if entry in self._held:
            self._held.remove(entry)
        self._scheduler.end(entry, Finish.ABORT)

    def _stop(self, reason: str, error: Exception) -> None:
        """Take nothing more; whoever still waits gets `error`."""
        self._closed = self._closed or reason
        for entry in self._flying.values():
            entry.fail(error)
        self._quiet.set()
        self._wake.set()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Copy `state` into the model; all or nothing."""
        own = dict(self._model.named_parameters())
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            raise WeightMismatch(f"the weights' names do not fit the model: {', '.join(odd)}")
        for name, parameter in own.items():
            if state[name].shape != parameter.shape:
                expected = f"expected {tuple(parameter.shape)}, got {tuple(state[name].shape)}"
                raise WeightMismatch(f"the shape of {name} does not fit the model: {expected}")
        fresh = {
            name: state[name].to(parameter.device, parameter.dtype)
            for name, parameter in own.items()
            if state[name].data_ptr() != parameter.data_ptr()
        }
        with torch.no_grad():
            for name, tensor in fresh.items():
                own[name].copy_(tensor)

    def _gap(self, probe: Probe | None) -> float:
        """Largest difference to the probe's logprobs."""
        if probe is None:
            return 0.0
        own = score(self._scheduler.model, probe.tokens, 1.0)
        gap = float(np.abs(own - probe.logprobs).max())
        if not gap <= PROBE_TOLERANCE:  # also where it is not a number
            raise WeightMismatch(
                f"a logprob of the probe differs by {gap:.3g}, allowed is {PROBE_TOLERANCE:g}"
            )
        return gap


def _check(sampling: Sampling, priority: int) -> None:
    """Raises `ValueError` where the numbers make no sense."""
    finite = 0 <= sampling.temperature <= MOST
    if not (finite and 0 < sampling.top_p <= 1 and sampling.max_tokens >= 1):
        raise ValueError(
            f"expected 0 ≤ temperature ≤ {MOST:g}, 0 < top_p ≤ 1 and max_tokens ≥ 1, got {sampling}"
        )
    if not (0 <= sampling.min_p <= 1 and 0 <= sampling.top_k < 2**31):
        raise ValueError(f"expected 0 ≤ min_p ≤ 1 and top_k ≥ 0 (0: all), got {sampling}")
    if any(abs(id) >= 2**31 for id in sampling.stop) or len(sampling.stop) > STOPS:
        raise ValueError(f"stop ids are token ids, at most {STOPS}, got {str(sampling.stop)[:200]}")
    if abs(priority) >= 2**31:
        raise ValueError(f"a priority is a number of 32 bits, got {priority}")
