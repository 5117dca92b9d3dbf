"""Several engines behind one: the same tokens whichever serves, affinity, failover, weights."""

import asyncio

import numpy as np
import pytest
import torch

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine, PauseMode
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.replicas import Replicas
from rollwright.engine.routing import BLOCK, Routing
from rollwright.errors import EngineClosed, EngineError, WeightMismatch
from rollwright.events import ListSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.testing.clock import FakeClock
from rollwright.types import Completion, Ints, PolicyVersion, Probe, Sampling

VOCAB, CONTEXT = 40, 96
VERSION = PolicyVersion(run="suite")


def decoder(seed: int = 0, dim: int = 16) -> Decoder:
    made = Decoder(ModelConfig(dim=dim, layers=2, heads=2, kv_heads=1, ffn=32, context=CONTEXT), VOCAB)
    made.initialise(torch.Generator().manual_seed(seed))
    return made


def embedded(seed: int = 0, dim: int = 16) -> Engine:
    return EmbeddedConfig().build(decoder(seed, dim), VERSION, SystemClock(), ListSink())


def prompt(length: int = 20, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


async def ask(engine: Engine, name: str, length: int = 20, tokens: int = 8, session: str = "") -> Completion:
    return await engine.generate(
        prompt(length), Sampling(max_tokens=tokens, seed=4), request=name, session=session
    )


async def served(engines: list[Engine]) -> list[int]:
    return [(await engine.health()).prompt_tokens for engine in engines]


async def test_whichever_replica_serves_the_tokens_are_the_same() -> None:
    engines = [embedded(), embedded(), embedded()]
    one, several = embedded(), Replicas(engines, SystemClock(), ListSink(), slack=0)
    await one.start()
    await several.start()
    try:
        names = [f"r{i}" for i in range(12)]
        alone = [await ask(one, name) for name in names]
        together = await asyncio.gather(*(ask(several, name) for name in names))
        assert min(await served(engines)) > 0, "a replica served nothing: the test shows nothing"
        for a, b in zip(alone, together, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.request == b.request
            assert np.abs(a.logprobs - b.logprobs).max() <= 1e-5
    finally:
        await one.close()
        await several.close()


async def test_a_conversation_stays_where_its_prefix_lies() -> None:
    engines = [embedded(), embedded()]
    several = Replicas(engines, SystemClock(), ListSink())
    await several.start()
    try:
        row = prompt(2 * BLOCK)
        for turn in range(3):
            done = await several.generate(row, Sampling(max_tokens=4), request=f"t{turn}")
            assert turn == 0 or done.cached >= len(row) - 8
            row = np.concatenate([row, done.tokens, prompt(3, seed=turn + 1)])
        assert sorted(await served(engines))[0] == 0
    finally:
        await several.close()


def test_routing_takes_session_then_longest_prefix_then_the_least_busy_within_its_bound() -> None:
    routing = Routing(slack=2)
    long = prompt(3 * BLOCK)
    routing.remember(1, long[:BLOCK], "")
    routing.remember(2, long[: 2 * BLOCK], "s")
    load = {0: 0, 1: 0, 2: 0}
    assert Routing(2).choose({0: 1, 1: 0}, long, "") == 1
    assert routing.choose(load, long, "") == 2
    assert routing.choose(load, prompt(9, seed=5), "s") == 2
    assert routing.choose({0: 0, 1: 0, 2: 3}, long, "") == 0, "the bound on the load was not kept"
    routing.forget()
    assert routing.choose({0: 1, 1: 0, 2: 1}, long, "") == 1


async def test_requests_of_a_replica_that_dies_are_asked_again_under_their_names() -> None:
    engines, events = [embedded(), embedded()], ListSink()
    several, one = Replicas(engines, SystemClock(), events, slack=0), embedded()
    await several.start()
    await one.start()
    try:
        tasks = [asyncio.create_task(ask(several, f"r{i}", tokens=40)) for i in range(4)]
        stream = several.stream(prompt(), Sampling(max_tokens=40, seed=4), request="s")
        out = [await anext(stream) for _ in range(3)]
        await engines[0].close()
        done = await asyncio.gather(*tasks)
        out += [chunk async for chunk in stream]
        for i, each in enumerate(done):
            assert each.tokens.tolist() == (await ask(one, f"r{i}", tokens=40)).tokens.tolist()
        whole = await one.generate(prompt(), Sampling(max_tokens=40, seed=4), request="s")
        assert [int(t) for chunk in out for t in chunk.tokens] == whole.tokens.tolist()
        assert [chunk.finish for chunk in out].count(None) == len(out) - 1
        assert any("replica 0 gets no traffic" in str(event) for event in events.events)
        await engines[1].close()
        with pytest.raises(EngineClosed, match="no replica answers"):
            await ask(several, "late")
    finally:
        await several.close()
        await one.close()


async def test_a_replica_that_refuses_its_weights_gets_no_traffic_until_it_takes_some() -> None:
    engines = [embedded(), embedded(dim=24)]  # the second has other shapes
    several = Replicas(engines, SystemClock(), ListSink(), slack=0)
    await several.start()
    try:
        await several.pause(PauseMode.WAIT)
        held = [asyncio.create_task(ask(several, f"r{i}")) for i in range(4)]
        await asyncio.sleep(0)
        newer = VERSION.next()
        assert await several.update(dict(decoder(1).named_parameters()), newer) == 0.0
        await several.resume()
        for each in await asyncio.gather(*held):
            assert [span.version for span in each.spans] == [newer]
        assert (await several.health()).ready and (await several.health()).version == newer
        with pytest.raises(WeightMismatch):
            await several.update({}, newer.next())
        assert not (await several.health()).ready
        last = newer.next().next()
        await several.update(dict(decoder(2, dim=24).named_parameters()), last)
        await several.resume()
        assert [span.version for span in (await ask(several, "z")).spans] == [last]
        assert (await engines[1].health()).prompt_tokens > 0
    finally:
        await several.close()


async def test_wrong_logprobs_at_one_replica_are_its_own_affair() -> None:
    engines = [embedded(), embedded()]
    several = Replicas(engines, SystemClock(), ListSink())
    await several.start()
    try:
        state, tokens = dict(decoder(1).named_parameters()), prompt()
        await several.update(state, VERSION.next())
        good = Probe(tokens=tokens, logprobs=await several.score(tokens))
        bad = Probe(tokens=tokens, logprobs=good.logprobs - 1)
        assert await several.update(state, VERSION.next().next(), good) <= 1e-5
        with pytest.raises(WeightMismatch):
            await several.update(state, VERSION.next().next().next(), bad)
    finally:
        await several.close()


async def test_a_replica_that_says_it_is_not_ready_gets_nothing_until_it_is() -> None:
    engines, clock = [embedded(), embedded()], FakeClock(auto=False)
    several = Replicas(engines, clock, ListSink(), slack=0)
    await several.start()
    try:
        await engines[0].pause(PauseMode.KEEP)  # by somebody else
        await asyncio.sleep(0)
        clock.advance(6.0)
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.gather(*(ask(several, f"r{i}") for i in range(4)))
        assert (await served(engines))[0] == 0
        await engines[0].resume()
        clock.advance(6.0)
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.gather(*(ask(several, f"q{i}") for i in range(4)))
        assert (await served(engines))[0] > 0
    finally:
        await several.close()


async def test_none_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Replicas([], SystemClock(), ListSink())
    engine = embedded()
    await engine.start()
    await engine.close()
    with pytest.raises(EngineError):
        await Replicas([engine], SystemClock(), ListSink()).start()
