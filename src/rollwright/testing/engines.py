"""Conformance suite of the engine seam: what every `Engine` must do, ours and a plug-in's.

Role: each check takes a maker of fresh engines and fails with an `AssertionError` or a timeout. Neighbours:
contract tests parametrise over `CHECKS` and implementations. Invariant: no check looks at a clock or at an
implementation; it knows the protocol, and two sets of weights that answer differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwright.engine.base import Engine, InFlight, PauseMode
from rollwright.errors import ContextOverflow, EngineClosed, WeightMismatch
from rollwright.types import Chunk, Completion, Finish, Floats, Ints, PolicyVersion, Probe, Sampling

TOLERANCE = 1e-5
"""Largest difference of two logprobs, in nats, that count as equal."""


@dataclass(frozen=True)
class Subject:
    """A fresh engine, not started, and what the checks must know about it."""

    engine: Engine
    vocab: int
    context: int
    """Tokens of the longest row; at least 48."""
    version: PolicyVersion
    other: Mapping[str, Any]
    """Other weights, which give other logprobs; `update` takes them."""


Make = Callable[[], Subject]


@asynccontextmanager
async def _started(make: Make) -> AsyncIterator[Subject]:
    """A started engine, closed at the end; ten seconds for everything."""
    subject = make()
    async with asyncio.timeout(10):
        await subject.engine.start()
        try:
            yield subject
        finally:
            await subject.engine.close()


def _prompt(subject: Subject, length: int = 12, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(0, subject.vocab, length).astype(np.int32)


def _joined(prompt: Ints, done: Completion) -> Ints:
    return np.concatenate([prompt, done.tokens])


def _near(a: Floats, b: Floats, what: str) -> None:
    assert a.shape == b.shape, f"{what}: {a.shape} and {b.shape}"
    gap = float(np.abs(a - b).max(initial=0.0))
    assert gap <= TOLERANCE, f"{what}: differ by {gap:.3g}"


async def _head(stream: AsyncIterator[Chunk], count: int) -> list[Chunk]:
    return [await anext(stream) for _ in range(count)]


async def _close(stream: AsyncIterator[Chunk]) -> None:
    await stream.aclose()  # type: ignore[attr-defined]  # every implementation is a generator, or has this


async def sampled(engine: Engine, tokens: int) -> None:
    """Return when `engine` has sampled `tokens` tokens since its start, while requests are still in
    flight."""
    for _ in range(100_000):
        if (await engine.health()).sampled_tokens >= tokens:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"the engine didn't sample {tokens} tokens")


async def check_generate_repeats(make: Make) -> None:
    """The same request gives the same tokens and logprobs, alone, beside others, and on another engine."""
    async with _started(make) as a, _started(make) as b:
        prompt, sampling = _prompt(a), Sampling(max_tokens=8, seed=3)
        alone = await a.engine.generate(prompt, sampling, request="x")
        others = [
            b.engine.generate(_prompt(b, 5 + i, i), Sampling(max_tokens=8), request=f"o{i}") for i in range(5)
        ]
        crowd = await asyncio.gather(b.engine.generate(prompt, sampling, request="x"), *others)
        again = await a.engine.generate(prompt, sampling, request="x")
        for done in (crowd[0], again):
            assert done.tokens.tolist() == alone.tokens.tolist(), "a repeated request gave other tokens"
            _near(done.logprobs, alone.logprobs, "logprobs of a repeated request")


async def check_completion_is_whole(make: Make) -> None:
    """Types, lengths, spans and counts of a completion fit together; the logprobs are those of `score`."""
    async with _started(make) as s:
        prompt = _prompt(s)
        done = await s.engine.generate(prompt, Sampling(max_tokens=8), request="x")
        assert done.request == "x" and done.prompt_tokens == len(prompt)
        assert done.tokens.dtype == np.int32 and done.logprobs.dtype == np.float32
        assert len(done.tokens) == len(done.logprobs) == 8 and done.finish is Finish.LENGTH
        assert [(p.version, p.start, p.end) for p in done.spans] == [(s.version, 0, 8)]
        assert (done.logprobs <= 0).all()
        scored = await s.engine.score(_joined(prompt, done))
        assert len(scored) == len(prompt) + 7
        _near(done.logprobs, scored[len(prompt) - 1 :], "completion and score")
        health = await s.engine.health()
        assert (health.prompt_tokens, health.sampled_tokens) == (len(prompt), 8)
        assert health.ready and health.running == health.waiting == 0


async def check_stream_equals_generate(make: Make) -> None:
    """The chunks of a stream, put together, are the completion; only the last one has a finish."""
    async with _started(make) as s:
        prompt, sampling = _prompt(s), Sampling(max_tokens=6, seed=1)
        done = await s.engine.generate(prompt, sampling, request="x")
        chunks = [chunk async for chunk in s.engine.stream(prompt, sampling, request="x")]
        assert np.concatenate([c.tokens for c in chunks]).tolist() == done.tokens.tolist()
        _near(np.concatenate([c.logprobs for c in chunks]), done.logprobs, "stream and completion")
        assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish is done.finish and {c.version for c in chunks} == {s.version}


async def check_stop_token(make: Make) -> None:
    """A sampled stop token ends the completion and belongs to it."""
    async with _started(make) as s:
        prompt = _prompt(s)
        free = await s.engine.generate(prompt, Sampling(max_tokens=8), request="x")
        stop = int(free.tokens[3])
        done = await s.engine.generate(prompt, Sampling(max_tokens=8, stop=(-1, stop)), request="x")
        expected = free.tokens[: free.tokens.tolist().index(stop) + 1]
        assert done.finish is Finish.STOP and done.tokens.tolist() == expected.tolist()


async def check_context_is_the_limit(make: Make) -> None:
    """A completion ends where the context does; a prompt that fills it is refused."""
    async with _started(make) as s:
        done = await s.engine.generate(_prompt(s, s.context - 2), Sampling(max_tokens=9), request="x")
        assert len(done.tokens) == 2 and done.finish is Finish.LENGTH
        try:
            await s.engine.generate(_prompt(s, s.context), Sampling(), request="y")
        except ContextOverflow:
            return
        raise AssertionError("a prompt as long as the context was accepted")


async def check_bad_requests(make: Make) -> None:
    """Empty prompts, unknown ids and names in use are refused, and leave nothing behind."""
    async with _started(make) as s:
        await s.engine.pause(PauseMode.KEEP)
        first = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(max_tokens=2), request="x"))
        await asyncio.sleep(0)
        bad = [([], "y"), ([s.vocab], "y"), ([-1], "y"), ([1, 2], "x")]
        for tokens, name in bad:
            try:
                await s.engine.generate(np.array(tokens, np.int32), Sampling(), request=name)
            except ValueError:
                continue
            raise AssertionError(f"prompt {tokens} as request {name!r} was accepted")
        await s.engine.resume()
        assert len((await first).tokens) == 2


async def check_prefix_is_cached(make: Make) -> None:
    """A second turn finds prompt and answer of the first in the cache; the answers are those of a cold
    engine."""
    async with _started(make) as warm, _started(make) as cold:
        prompt, sampling = _prompt(warm), Sampling(max_tokens=6)
        first = await warm.engine.generate(prompt, sampling, request="x")
        assert first.cached == 0
        longer = np.concatenate([_joined(prompt, first), _prompt(warm, 5, 9)])
        second = await warm.engine.generate(longer, sampling, request="y")
        assert second.cached >= len(prompt) + len(first.tokens) - 1, f"only {second.cached} cached"
        afresh = await cold.engine.generate(longer, sampling, request="y")
        assert second.tokens.tolist() == afresh.tokens.tolist()
        _near(second.logprobs, afresh.logprobs, "cached and cold")
        health = await warm.engine.health()
        assert health.cached_tokens == second.cached and health.kv_tokens <= health.kv_capacity


async def check_abort(make: Make) -> None:
    """An aborted request returns the tokens so far; unknown ids are ignored; others go on."""
    async with _started(make) as s:
        sampling = Sampling(max_tokens=20)
        stream = s.engine.stream(_prompt(s), sampling, request="x")
        whole = asyncio.create_task(s.engine.generate(_prompt(s, 7), sampling, request="y"))
        other = asyncio.create_task(s.engine.generate(_prompt(s, 9), sampling, request="z"))
        await _head(stream, 3)
        await s.engine.abort(["x", "y", "nobody"])
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish is Finish.ABORT
        done = await whole
        assert done.finish is Finish.ABORT and len(done.tokens) < 20
        assert len(done.logprobs) == len(done.tokens) == sum(p.end - p.start for p in done.spans)
        assert len((await other).tokens) == 20


async def check_cancel_frees(make: Make) -> None:
    """Cancelling a caller and closing a stream end the request; its name is free again."""
    async with _started(make) as s:
        sampling = Sampling(max_tokens=30)
        task = asyncio.create_task(s.engine.generate(_prompt(s), sampling, request="x"))
        stream = s.engine.stream(_prompt(s, 8), sampling, request="y")
        await _head(stream, 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _close(stream)
        health = await s.engine.health()
        assert health.running == health.waiting == 0, f"still there: {health}"
        again = await s.engine.generate(_prompt(s), Sampling(max_tokens=2), request="x")
        assert len(again.tokens) == 2


async def check_pause_wait(make: Make) -> None:
    """WAIT returns when what was in flight is finished; new requests wait for `resume`; `score` still
    works."""
    async with _started(make) as s:
        early = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(max_tokens=6), request="x"))
        await asyncio.sleep(0)
        await s.engine.pause()
        await asyncio.sleep(0)
        assert early.done() and len(early.result().tokens) == 6
        late = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(max_tokens=6), request="y"))
        for _ in range(20):
            await asyncio.sleep(0)
        await s.engine.pause()
        health = await s.engine.health()
        assert not late.done() and health.waiting == 1 and not health.ready
        assert len(await s.engine.score(_prompt(s))) == len(_prompt(s)) - 1
        await s.engine.resume()
        await s.engine.resume()
        assert len((await late).tokens) == 6


async def check_pause_keep(make: Make) -> None:
    """KEEP freezes: nothing is sampled until `resume`, then the request goes on as if nothing had been."""
    async with _started(make) as s:
        prompt, sampling = _prompt(s), Sampling(max_tokens=10)
        whole = await s.engine.generate(prompt, sampling, request="x")
        stream = s.engine.stream(prompt, sampling, request="x")
        head = await _head(stream, 3)
        await s.engine.pause(PauseMode.KEEP)
        before = (await s.engine.health()).sampled_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await s.engine.health()).sampled_tokens == before, "sampled while paused"
        await s.engine.resume()
        chunks = [*head, *[chunk async for chunk in stream]]
        assert np.concatenate([c.tokens for c in chunks]).tolist() == whole.tokens.tolist()


async def check_pause_abort(make: Make) -> None:
    """ABORT ends what is in flight with the tokens so far; new requests wait."""
    async with _started(make) as s:
        task = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(max_tokens=30), request="x"))
        await sampled(s.engine, 2)
        await s.engine.pause(PauseMode.ABORT)
        done = await task
        assert done.finish is Finish.ABORT and len(done.tokens) < 30
        late = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(max_tokens=1), request="z"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not late.done()
        await s.engine.resume()
        assert (await late).finish is Finish.LENGTH


async def check_update(make: Make) -> None:
    """After an update completions carry the new version and its logprobs, and no old KV is used."""
    async with _started(make) as s:
        prompt, sampling, newer = _prompt(s), Sampling(max_tokens=6), s.version.next()
        old = await s.engine.generate(prompt, sampling, request="x")
        before = await s.engine.score(_joined(prompt, old))
        assert await s.engine.update(s.other, newer) == 0.0
        after = await s.engine.score(_joined(prompt, old))
        assert np.abs(after - before).max() > 1e-3, "the other weights answer alike: they test nothing"
        new = await s.engine.generate(prompt, sampling, request="y")
        assert new.cached == 0, "KV of the old version was used"
        assert [p.version for p in new.spans] == [newer] == [(await s.engine.health()).version]
        scored = await s.engine.score(_joined(prompt, new))
        _near(new.logprobs, scored[len(prompt) - 1 :], "after the update")


async def check_update_in_flight(make: Make) -> None:
    """A request frozen by KEEP goes on under new weights: two spans, each with its own version's logprobs."""
    async with _started(make) as s:
        prompt, sampling, newer = _prompt(s), Sampling(max_tokens=12), s.version.next()
        task = asyncio.create_task(s.engine.generate(prompt, sampling, request="x"))
        await sampled(s.engine, 4)
        await s.engine.pause(PauseMode.KEEP)
        await s.engine.update(s.other, newer)
        await s.engine.resume()
        done = await task
        first, second = done.spans
        assert (first.version, second.version) == (s.version, newer)
        assert (first.start, first.end, second.end) == (0, second.start, 12) and 0 < first.end < 12
        scored = (await s.engine.score(_joined(prompt, done)))[len(prompt) - 1 :]
        _near(done.logprobs[first.end :], scored[first.end :], "the span after the update")
    async with _started(make) as s:
        scored = (await s.engine.score(_joined(prompt, done)))[len(prompt) - 1 :]
        _near(done.logprobs[: first.end], scored[: first.end], "the span before the update")


async def check_update_stops(make: Make) -> None:
    """STOP ends what is being generated with the tokens so far, all of the version that sampled them."""
    async with _started(make) as s:
        prompt, newer = _prompt(s), s.version.next()
        task = asyncio.create_task(s.engine.generate(prompt, Sampling(max_tokens=30), request="x"))
        await sampled(s.engine, 3)
        await s.engine.update(s.other, newer, None, InFlight.STOP)
        done = await task
        assert done.finish is Finish.ABORT and 3 <= len(done.tokens) < 30
        assert [(p.version, p.start, p.end) for p in done.spans] == [(s.version, 0, len(done.tokens))]
        after = await s.engine.generate(prompt, Sampling(max_tokens=2), request="x")
        assert [p.version for p in after.spans] == [newer] and after.finish is Finish.LENGTH


async def check_update_restarts(make: Make) -> None:
    """RESTART begins again from the prompt, as if nothing had been sampled; a stream, whose tokens are out,
    ends."""
    async with _started(make) as s, _started(make) as fresh:
        prompt, sampling, newer = _prompt(s), Sampling(max_tokens=30), s.version.next()
        task = asyncio.create_task(s.engine.generate(prompt, sampling, request="x"))
        await sampled(s.engine, 3)
        await s.engine.update(s.other, newer, None, InFlight.RESTART)
        await fresh.engine.update(fresh.other, newer)
        done, again = await task, await fresh.engine.generate(prompt, sampling, request="x")
        assert [(p.version, p.start, p.end) for p in done.spans] == [(newer, 0, 30)]
        assert done.tokens.tolist() == again.tokens.tolist(), "a restarted request answers otherwise"
        _near(done.logprobs, again.logprobs, "a restarted and a fresh request")
    async with _started(make) as s:
        stream = s.engine.stream(prompt, sampling, request="y")
        head = await _head(stream, 3)
        await s.engine.update(s.other, newer, None, InFlight.RESTART)
        chunks = [*head, *[chunk async for chunk in stream]]
        assert chunks[-1].finish is Finish.ABORT
        assert {c.version for c in chunks if len(c.tokens)} == {s.version}


async def check_wrong_weights(make: Make) -> None:
    """Weights that miss their probe, or don't fit, raise `WeightMismatch`, serve nothing and cannot be
    resumed; good ones repair it."""
    async with _started(make) as s:
        tokens = _joined(
            _prompt(s), await s.engine.generate(_prompt(s), Sampling(max_tokens=4), request="probe")
        )
        stale = Probe(tokens=tokens, logprobs=await s.engine.score(tokens))
        newer = s.version.next()
        for state, probe in ((s.other, stale), ({"nonsense": 0}, None), ({}, None)):
            try:
                await s.engine.update(state, newer, probe)
            except WeightMismatch:
                assert not (await s.engine.health()).ready
                continue
            raise AssertionError("weights were taken that are not the trainer's")
        task = asyncio.create_task(s.engine.generate(tokens, Sampling(max_tokens=2), request="x"))
        try:
            await s.engine.resume()
        except WeightMismatch:
            pass
        else:
            raise AssertionError("an engine with wrong weights was resumed")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done(), "wrong weights answered a request"
        await s.engine.update(s.other, newer)
        good = Probe(tokens=tokens, logprobs=await s.engine.score(tokens))
        assert await s.engine.update(s.other, newer, good) <= TOLERANCE
        await s.engine.resume()
        assert [p.version for p in (await task).spans] == [newer]
        assert (await s.engine.health()).ready


async def check_close(make: Make) -> None:
    """Closing raises `EngineClosed` in requests in flight, frozen ones too, and refuses later ones.
    Idempotent."""
    async with _started(make) as s:
        await s.engine.start()
        task = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(max_tokens=40), request="x"))
        stream = s.engine.stream(_prompt(s), Sampling(max_tokens=30), request="y")
        await _head(stream, 2)
        await s.engine.pause(PauseMode.KEEP)
        held = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(), request="z"))
        await asyncio.sleep(0)
        await s.engine.close()
        await s.engine.close()
        late = asyncio.create_task(s.engine.generate(_prompt(s), Sampling(), request="late"))
        rest = asyncio.ensure_future(_head(stream, 30))
        for what in (task, held, late, rest):
            result = (await asyncio.gather(what, return_exceptions=True))[0]
            assert isinstance(result, EngineClosed), f"expected EngineClosed, got {result!r}"


CHECKS: tuple[Callable[[Make], Awaitable[None]], ...] = (
    check_generate_repeats,
    check_completion_is_whole,
    check_stream_equals_generate,
    check_stop_token,
    check_context_is_the_limit,
    check_bad_requests,
    check_prefix_is_cached,
    check_abort,
    check_cancel_frees,
    check_pause_wait,
    check_pause_keep,
    check_pause_abort,
    check_update,
    check_update_in_flight,
    check_update_stops,
    check_update_restarts,
    check_wrong_weights,
    check_close,
)
"""The whole suite."""
