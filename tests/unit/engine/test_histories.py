"""KV is where the books say it is: moved, shared, retracted, shrunk, and every byte of it told."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cold import VOCAB, Kind, copied, decoder, judge

from rollwright.clock import SystemClock
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded import histories
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.errors import ContextOverflow
from rollwright.events import NullSink
from rollwright.types import Completion, Finish, Ints, PolicyVersion, Sampling

VERSION = PolicyVersion(run="histories")
KIND = Kind(kv_heads=1)
MODELS = {VERSION: decoder(KIND, 0)}
TOKEN_BYTES = MODELS[VERSION].shape.kv_values * 4


@asynccontextmanager
async def serving(**settings: int) -> AsyncIterator[EmbeddedEngine]:
    gc.collect()  # engines of other tests: `held` would count what is theirs
    config = EmbeddedConfig(**settings)
    engine = EmbeddedEngine(copied(KIND, 0), config, VERSION, SystemClock(), NullSink())
    await engine.start()
    yield engine
    engine.check_integrity()
    await engine.close()


def ids(seed: int, length: int) -> Ints:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


async def say(engine: EmbeddedEngine, prompt: Ints, name: str, tokens: int, **more: Any) -> Completion:
    sampling = Sampling(max_tokens=tokens, **more)
    done = await engine.generate(prompt, sampling, request=name)
    judge(MODELS, prompt, sampling, done)
    return done


def held(engine: EmbeddedEngine) -> int:
    """Bytes of all KV that is alive: of anything shaped like the table or a block of this model."""
    shape, found = engine._model.shape, {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.dim() in (5, 6):
            like = each.shape[:2] == (shape.layers, 2) and each.shape[-1] == shape.head_dim
            heads = each.shape[3 if each.dim() == 6 else 2]
            if like and heads == shape.kv_heads:
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return sum(found.values())


async def told(engine: EmbeddedEngine) -> int:
    """What `Health` says of both tiers."""
    health = await engine.health()
    return health.kv_bytes + health.host_tokens * TOKEN_BYTES


@pytest.mark.parametrize("host", [0, 200])
async def test_the_bytes_told_are_those_that_are_held(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SHARE", 4)
    async with serving(max_batch=12, row_tokens=32, kv_tokens=150, host_tokens=host) as engine:
        checked = 0

        async def watch() -> None:
            nonlocal checked
            while True:
                for _ in range(5):
                    await asyncio.sleep(0)
                assert held(engine) == await told(engine)
                checked += 1

        async def rollout(number: int) -> None:
            history = np.concatenate([ids(number // 4, 40), ids(number, 5)])
            for turn in range(3):
                done = await say(engine, history, f"{number}/{turn}", 9)
                history = np.concatenate([history, done.tokens, ids(number + turn, 3)])

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(rollout(i) for i in range(8)))
        assert not watcher.done(), watcher.exception()
        watcher.cancel()
        assert checked > 3 and held(engine) == await told(engine)


async def test_an_idle_engine_holds_no_rows() -> None:
    async with serving(max_batch=16) as engine:
        await asyncio.gather(*(say(engine, ids(i, 9), str(i), 20 + 4 * i) for i in range(16)))
        assert (await engine.health()).running == 0
        assert engine._scheduler.histories.kv.bytes == 0
        assert held(engine) == await told(engine)


async def test_rows_move_with_all_that_is_theirs() -> None:
    """When many have ended the others close up: stop ids, noise and what they read in place move too."""
    stops = [tuple(ids(100 + i, 2).tolist()) for i in range(16)]
    async with serving(max_batch=16) as engine:
        limits = [2] * 12 + [60, 50, 40, 45]
        moved = 0
        kv: Any = engine._scheduler.histories.kv
        move = kv.move

        def counted(*given: int) -> None:
            nonlocal moved
            moved += 1
            move(*given)

        kv.move = counted
        done = await asyncio.gather(
            *(
                say(engine, ids(i, 20), str(i), limit, stop=stops[i], temperature=[0.6, 1.0, 1.4][i % 3])
                for i, limit in enumerate(limits)
            )
        )
        assert moved >= 3
    for i, each in enumerate(done):
        stopped = [at for at, id in enumerate(each.tokens.tolist()) if id in stops[i]]
        ended = [len(each.tokens) - 1] if each.finish is Finish.STOP else []
        assert stopped == ended, f"{i} stopped for another's stop id, or went on over its own"


async def test_who_came_first_is_never_put_back() -> None:
    async with serving(max_batch=4, row_tokens=16, kv_tokens=120, prefill_tokens=9) as engine:
        scheduler: Any = engine._scheduler
        retract, victims = scheduler._retract, []

        def watched() -> None:
            batch = scheduler.batch
            rows = batch.active()
            top = rows[batch.priority[rows] == batch.priority[rows].max()]
            first = batch.requests[top[batch.order[top].argmin()]]
            before = set(map(id, scheduler.waiting))
            retract()
            victim = next(r for r in scheduler.waiting if id(r) not in before)
            victims.append((victim, first))
            assert len(rows) > 1, "the only one was put back"

        scheduler._retract = watched
        jobs = [
            engine.generate(ids(i, 20), Sampling(max_tokens=60), request=str(i), priority=int(i in (2, 5)))
            for i in range(8)
        ]
        done = await asyncio.gather(*jobs)
        for i, each in enumerate(done):
            assert len(each.tokens) == 60
            judge(MODELS, ids(i, 20), Sampling(max_tokens=60), each)
        assert len(victims) >= 3, "memory was not short"
        assert all(victim is not first for victim, first in victims)
        assert (await engine.health()).retracted == len(victims)


async def test_what_never_fits_is_refused_with_the_key_to_change() -> None:
    async with serving(row_tokens=16, kv_tokens=50) as engine:
        with pytest.raises(ContextOverflow, match=r"than the 50 .* raise engine\.kv_tokens"):
            await engine.generate(ids(0, 50), Sampling(), request="a")
        done = await say(engine, ids(0, 49), "b", 9)
        assert (len(done.tokens), done.finish) == (1, Finish.LENGTH)
    async with serving(row_tokens=60, kv_tokens=1) as engine:
        done = await say(engine, ids(0, 55), "c", 90)
        assert (len(done.tokens), done.finish) == (5, Finish.LENGTH)


async def test_a_history_comes_back_from_the_host_tier_instead_of_being_computed() -> None:
    async with serving(kv_tokens=70, host_tokens=300) as engine:
        first = await say(engine, ids(0, 50), "a", 9)
        for i in range(3):
            await say(engine, ids(1 + i, 50), f"other {i}", 9)
        assert (await engine.health()).host_tokens >= 58
        again = np.concatenate([ids(0, 50), first.tokens, ids(9, 3)])
        assert (await say(engine, again, "b", 9)).cached == 58


async def test_a_following_turn_takes_its_history_whole_where_it_may() -> None:
    """One that only this request goes on from lies in one place: in its row, not in the tree."""
    async with serving() as engine:
        first = await say(engine, ids(0, 50), "a", 9)
        radix: Any = engine._scheduler.histories.radix
        assert radix.tokens == 58
        longer = np.concatenate([ids(0, 50), first.tokens, ids(9, 3)])
        job = asyncio.create_task(say(engine, longer, "b", 30))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (await engine.health()).running == 1 and radix.tokens == 0
        await job
        assert radix.tokens == len(longer) + 29


async def test_kv_of_broken_weights_harms_nobody_after_good_ones() -> None:
    good = {name: each.detach().clone() for name, each in decoder(KIND, 0).named_parameters()}
    broken = good | {"blocks.0.attention_norm.weight": good["blocks.0.attention_norm.weight"] * torch.nan}
    async with serving(prefill_tokens=8) as engine:
        await engine.update(broken, VERSION.next())
        job = asyncio.create_task(engine.generate(ids(0, 60), Sampling(), request="a"))
        for _ in range(4):  # some of its prompt is computed, nothing is sampled
            await asyncio.sleep(0)
        assert (await engine.health()).running == 1
        await engine.abort(["a"])
        await job
        await engine.update(good, VERSION)
        await asyncio.gather(say(engine, ids(1, 3), "b", 20), say(engine, ids(2, 40), "c", 20))
