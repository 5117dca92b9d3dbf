"""The embedded engine computes the same numbers however it batches, caches, chunks, evicts or is updated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from rollwright.clock import Clock, SystemClock
from rollwright.engine.base import PauseMode
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.engine.embedded.scheduler import SIBLING
from rollwright.engine.embedded.step import score
from rollwright.errors import EngineClosed, EngineError, WeightMismatch
from rollwright.events import ListSink, Noted
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.pool.base import WorkKind
from rollwright.testing.clock import FakeClock
from rollwright.testing.engines import sampled
from rollwright.types import Completion, Finish, Ints, PolicyVersion, Probe, Sampling

VOCAB = 60
VERSION = PolicyVersion(run="test")
TOLERANCE = 1e-5


def decoder(seed: int = 0, kv_heads: int = 2, context: int = 160) -> Decoder:
    config = ModelConfig(dim=32, layers=2, heads=4, kv_heads=kv_heads, ffn=48, context=context, tied=False)
    made = Decoder(config, VOCAB)
    made.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():  # so that every token's past weighs in what comes next
        made.embed.weight.mul_(20)
    return made


@asynccontextmanager
async def serving(
    model: Decoder | None = None, clock: Clock | None = None, **settings: int
) -> AsyncIterator[EmbeddedEngine]:
    config = EmbeddedConfig(**settings)
    engine = EmbeddedEngine(model or decoder(), config, VERSION, clock or SystemClock(), ListSink())
    await engine.start()
    yield engine
    engine.check_integrity()
    await engine.close()


def ids(rng: np.random.Generator, length: int) -> Ints:
    return rng.integers(0, VOCAB, length).astype(np.int32)


async def rollout(engine: EmbeddedEngine, number: int, turns: int = 3) -> list[Completion]:
    """Turns of various lengths and samplings; siblings (four in a row) share their prompt. Checks every
    logprob against a cold score."""
    prompt_rng, rng = np.random.default_rng(number // 4), np.random.default_rng(1000 + number)
    context = np.concatenate([np.arange(9, dtype=np.int32), ids(prompt_rng, 5 + number // 4 * 3)])
    done = []
    for turn in range(turns):
        temperature = float(rng.choice([0.0, 0.7, 1.0]))
        stop = tuple(ids(rng, int(rng.integers(0, 4))).tolist())
        limit = int(rng.choice([1, 4, 9, 25]))
        sampling = Sampling(temperature=temperature, max_tokens=limit, stop=stop, seed=5)
        completion = await engine.generate(context, sampling, request=f"{number}/{turn}")
        full = np.concatenate([context, completion.tokens])
        cold = await engine.score(full, temperature=temperature or 1.0)
        assert np.abs(cold[len(context) - 1 :] - completion.logprobs).max() <= TOLERANCE
        done.append(completion)
        context = np.concatenate([full, ids(rng, int(rng.integers(1, 9)))])
    return done


SETTINGS: dict[str, dict[str, int]] = {
    "default": {},
    "cold: nothing is cached": {"kv_tokens": 1},
    "evicting": {"kv_tokens": 150},
    "chunked": {"prefill_tokens": 5},
    "few rows": {"max_batch": 3},
    "all at once": {"max_batch": 5, "prefill_tokens": 7, "kv_tokens": 90},
}


@pytest.mark.parametrize(
    ("kv_heads", "names"), [(2, list(SETTINGS)), (1, ["default", "all at once"]), (4, ["default"])]
)
async def test_logprobs_are_those_of_a_cold_score_however_they_were_computed(
    kv_heads: int, names: list[str]
) -> None:
    spoken: dict[str, list[list[int]]] = {}
    for name in names:
        async with serving(decoder(kv_heads=kv_heads), **SETTINGS[name]) as engine:
            done = [
                c for turns in await asyncio.gather(*(rollout(engine, i) for i in range(12))) for c in turns
            ]
            health = await engine.health()
        spoken[name] = [c.tokens.tolist() for c in done]
        assert health.sampled_tokens == sum(map(len, spoken[name]))
        assert len({token for tokens in spoken[name] for token in tokens}) > VOCAB / 2, (
            "hardly anything is said"
        )
        if name == "default":
            assert health.hit_rate is not None and health.hit_rate > 0.5
        if name.startswith("cold"):
            assert health.cached_tokens < len(done)
    assert all(tokens == spoken["default"] for tokens in spoken.values()), "batching changed what was sampled"


async def test_rows_move_together_when_most_requests_have_ended() -> None:
    async with serving(max_batch=16) as engine, serving(max_batch=1) as alone:
        rng = np.random.default_rng(0)
        prompts = [ids(rng, 20) for _ in range(16)]
        limits = [2] * 13 + [40, 60, 50]
        jobs = [
            [
                e.generate(prompt, Sampling(max_tokens=limit), request=str(i))
                for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            ]
            for e in (engine, alone)
        ]
        together, one_by_one = [await asyncio.gather(*each) for each in jobs]
        for a, b in zip(together, one_by_one, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert np.abs(a.logprobs - b.logprobs).max() <= TOLERANCE


async def test_rows_grow_under_running_requests() -> None:
    async with serving() as engine:
        prompt = ids(np.random.default_rng(0), 120)
        done = await engine.generate(prompt, Sampling(max_tokens=40), request="a")
        assert len(done.tokens) == 40
        cold = await engine.score(np.concatenate([prompt, done.tokens]))
        assert np.abs(cold[len(prompt) - 1 :] - done.logprobs).max() <= TOLERANCE


async def test_noise_and_top_p_reach_the_sampler() -> None:
    model = decoder()
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.zero_()  # every token is as likely as any other
    async with serving(model) as engine:
        prompt = ids(np.random.default_rng(0), 10)
        wide = await engine.generate(prompt, Sampling(max_tokens=40), request="a")
        narrow = await engine.generate(prompt, Sampling(max_tokens=40, top_p=0.5), request="a")
        other = await engine.generate(prompt, Sampling(max_tokens=40, seed=1), request="a")
    assert np.allclose(wide.logprobs, -np.log(VOCAB), atol=1e-5)
    assert np.allclose(narrow.logprobs, -np.log(VOCAB / 2), atol=1e-5)
    assert len(set(wide.tokens.tolist())) > 20, "noise does not change with the position"
    assert wide.tokens.tolist() != other.tokens.tolist(), "noise does not change with the seed"


async def test_siblings_compute_their_prompt_once() -> None:
    async with serving() as engine:
        prompt = ids(np.random.default_rng(0), 50)
        siblings = [engine.generate(prompt, Sampling(max_tokens=5), request=str(i)) for i in range(8)]
        done = await asyncio.gather(*siblings)
        assert sorted(c.cached for c in done) == [0] + [49] * 7
        assert len({tuple(c.tokens.tolist()) for c in done}) > 1, "siblings must differ"


async def test_siblings_wait_for_a_prompt_that_takes_several_steps() -> None:
    async with serving(prefill_tokens=16) as engine:
        prompt = ids(np.random.default_rng(0), 70)
        first = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=3), request="first"))
        for _ in range(3):
            await asyncio.sleep(0)
        late = [engine.generate(prompt, Sampling(max_tokens=3), request=str(i)) for i in range(4)]
        done = await asyncio.gather(*late)
        assert (await first).cached == 0 and all(c.cached > 69 - SIBLING for c in done)


async def test_the_next_turn_finds_prompt_and_answer() -> None:
    async with serving() as engine:
        prompt = ids(np.random.default_rng(0), 30)
        first = await engine.generate(prompt, Sampling(max_tokens=6), request="a")
        longer = np.concatenate([prompt, first.tokens, prompt[:7]])
        second = await engine.generate(longer, Sampling(max_tokens=6), request="b")
        assert second.cached == 30 + 6 - 1  # the last sampled token was never fed


async def test_cancelled_requests_leave_nothing_behind() -> None:
    async with serving(max_batch=4, prefill_tokens=30) as engine:
        rng = np.random.default_rng(0)
        tasks = [
            asyncio.create_task(engine.generate(ids(rng, 40), Sampling(max_tokens=50), request=str(i)))
            for i in range(10)
        ]
        for step in range(10):
            for _ in range(3):
                await asyncio.sleep(0)
            tasks[step].cancel()
            await asyncio.gather(tasks[step], return_exceptions=True)
            engine.check_integrity()
        health = await engine.health()
        assert health.running == health.waiting == 0
        cached = health.kv_tokens
        assert 0 < cached <= 10 * 90
        await engine.update(dict(decoder().named_parameters()), VERSION.next())
        assert (await engine.health()).kv_tokens == 0, "KV outlived its request and its cache"


async def test_an_update_in_flight_recomputes_and_shares() -> None:
    first, second = decoder(0), decoder(1)
    prompt = ids(np.random.default_rng(0), 40)
    async with serving(decoder(0), prefill_tokens=64) as engine:
        tasks = [
            asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=30), request=str(i)))
            for i in range(6)
        ]
        await sampled(engine, 60)
        await engine.update(dict(second.named_parameters()), VERSION.next())  # no pause: between two steps
        done = await asyncio.gather(*tasks)
    for version, model in ((VERSION, first), (VERSION.next(), second)):
        async with serving(model) as judge:
            for completion in done:
                full = np.concatenate([prompt, completion.tokens])
                cold = (await judge.score(full))[len(prompt) - 1 :]
                spans = [span for span in completion.spans if span.version == version]
                assert len(spans) == 1
                part = slice(spans[0].start, spans[0].end)
                assert spans[0].end > spans[0].start
                assert np.abs(cold[part] - completion.logprobs[part]).max() <= TOLERANCE
    assert all([s.start for s in c.spans] == [0, c.spans[0].end] and c.spans[1].end == 30 for c in done)


async def test_live_weights_are_taken_without_a_copy() -> None:
    model = decoder()
    live = dict(model.named_parameters())
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    async with serving(model) as engine:
        prompt = ids(np.random.default_rng(0), 20)
        old = await engine.generate(prompt, Sampling(max_tokens=4), request="a")
        with torch.no_grad():
            for tensor in live.values():
                tensor.mul_(1.1)
        probe = Probe(tokens=prompt, logprobs=score(model, prompt, 1.0))
        assert await engine.update(live, VERSION.next(), probe) <= TOLERANCE
        new = await engine.generate(prompt, Sampling(max_tokens=4), request="a")
        cold = (await engine.score(np.concatenate([prompt, new.tokens])))[len(prompt) - 1 :]
        assert new.cached == 0 and np.abs(cold - new.logprobs).max() <= TOLERANCE
        assert np.abs(new.logprobs[0] - old.logprobs[0]) > 1e-3
    assert places == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    assert all(tensor.requires_grad and not tensor.is_inference() for tensor in live.values())


@pytest.mark.parametrize(
    "fault", ["stale", "not a number", "one shape", "one missing", "no tensor", "probe of foreign ids"]
)
async def test_wrong_weights_serve_nothing(fault: str) -> None:
    async with serving(decoder(0)) as engine, serving(decoder(1)) as trainer:
        tokens = ids(np.random.default_rng(0), 20)
        probe = Probe(tokens=tokens, logprobs=await trainer.score(tokens))
        state = {name: tensor.detach().clone() for name, tensor in decoder(1).named_parameters()}
        if fault == "stale":
            state["blocks.1.down.weight"] = decoder(0).get_parameter("blocks.1.down.weight")
        elif fault == "not a number":
            state["blocks.1.down.weight"][0, 0] = torch.nan
        elif fault == "one shape":
            state["norm.weight"] = torch.ones(7)
        elif fault == "no tensor":
            state["norm.weight"] = None  # type: ignore[assignment]
        elif fault == "probe of foreign ids":
            probe = Probe(tokens=np.array([1, VOCAB + 5], np.int32), logprobs=np.zeros(1, np.float32))
        else:
            del state["norm.weight"]
        with pytest.raises(WeightMismatch, match=r"norm\.weight" if fault.startswith("one") else "probe"):
            await engine.update(state, VERSION.next(), probe)
        with pytest.raises(WeightMismatch, match="cannot resume"):
            await engine.resume()
        assert not (await engine.health()).ready


async def test_a_broken_step_ends_every_request_with_its_cause() -> None:
    model = decoder()
    async with serving(model) as engine:
        broken = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        broken["norm.weight"][0] = torch.nan
        await engine.update(broken, VERSION.next())
        jobs = [
            engine.generate(ids(np.random.default_rng(i), 5), Sampling(), request=str(i)) for i in range(3)
        ]
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(result, EngineError) and "not finite" in str(result)
        with pytest.raises(EngineClosed, match="not finite"):
            await engine.generate(ids(np.random.default_rng(0), 5), Sampling(), request="later")


class TakenBack:
    """A lease that a test revokes."""

    id, kind, slices = "lease-1", WorkKind.SAMPLING, 1

    def __init__(self) -> None:
        self.event = asyncio.Event()

    @property
    def revoked(self) -> bool:
        return self.event.is_set()

    async def wait_revoked(self) -> float:
        await self.event.wait()
        return 5.0

    def check(self) -> None:
        assert not self.revoked


@pytest.mark.parametrize("paused", [False, True])
async def test_a_revoked_lease_ends_the_engine_with_the_tokens_so_far(paused: bool) -> None:
    lease, events = TakenBack(), ListSink()
    config = EmbeddedConfig(max_batch=2)
    engine = EmbeddedEngine(decoder(), config, VERSION, SystemClock(), events, lease)
    await engine.start()
    jobs = [
        asyncio.create_task(
            engine.generate(ids(np.random.default_rng(i), 5), Sampling(max_tokens=100), request=str(i))
        )
        for i in range(3)
    ]
    await sampled(engine, 8)
    if paused:
        await engine.pause(PauseMode.KEEP)
    lease.event.set()
    done = await asyncio.gather(*jobs)
    assert all(c.finish is Finish.ABORT for c in done)
    assert sum(len(c.tokens) for c in done) >= 8 and len(done[2].tokens) == 0
    with pytest.raises(EngineClosed, match="lease-1"):
        await engine.generate(ids(np.random.default_rng(0), 5), Sampling(), request="later")
    assert any(isinstance(event, Noted) and "lease-1" in event.text for event in events.events)
    await engine.close()


async def test_idle_time_is_counted_while_it_passes() -> None:
    clock = FakeClock(auto=False)
    async with serving(clock=clock) as engine:
        await asyncio.sleep(0)
        clock.advance(3.0)
        assert (await engine.health()).idle_seconds == 3.0
        await engine.generate(ids(np.random.default_rng(0), 5), Sampling(max_tokens=2), request="a")
        await asyncio.sleep(0)
        clock.advance(1.0)
        health = await engine.health()
        assert (health.idle_seconds, health.busy_seconds) == (4.0, 0.0)


async def test_what_sampling_cannot_mean_is_refused() -> None:
    async with serving() as engine:
        for wrong in (
            {"temperature": -1.0},
            {"temperature": float("nan")},
            {"top_p": 0.0},
            {"top_p": 1.5},
            {"max_tokens": 0},
        ):
            with pytest.raises(ValueError, match="expected 0 ≤ temperature"):
                await engine.generate(np.ones(3, np.int32), Sampling(**wrong), request="a")
        with pytest.raises(ValueError, match="stop ids"):
            await engine.generate(np.ones(3, np.int32), Sampling(stop=(2**63,)), request="a")
        with pytest.raises(ValueError, match="token ids are"):
            await engine.generate(np.array([1, 2**32 + 3]), Sampling(), request="a")
        with pytest.raises(ValueError, match="above 0"):
            await engine.score(np.ones(3, np.int32), temperature=0.0)
