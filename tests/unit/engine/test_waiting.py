"""Who goes first: priority, then the longest cached prefix, then age; and nobody waits for ever."""

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
from cold import Kind, copied
from hypothesis import given
from hypothesis import strategies as st

from rollwright.clock import SystemClock
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.engine.embedded.request import Request
from rollwright.engine.embedded.waiting import PATIENCE, WINDOW, Waiting
from rollwright.events import NullSink
from rollwright.types import Ints, PolicyVersion, Sampling

VERSION = PolicyVersion(run="waiting")


def request(name: str, priority: int = 0) -> Request:
    loop = asyncio.new_event_loop()
    result = loop.create_future()
    loop.close()
    ids = np.array([1, 2, 3], np.int32)
    return Request(name, ids, Sampling(), 0, 9, result, None, 3, priority=priority)


def names(requests: Iterable[Request]) -> list[str]:
    return [each.id for each in requests]


def test_priority_then_age_and_what_ran_already_before_both_of_its_priority() -> None:
    waiting = Waiting()
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", -1), ("e", 1)]:
        waiting.add(request(name, priority))
    assert names(waiting) == ["b", "e", "a", "c", "d"]
    waiting.put_back([request("x", 0), request("y", 1), request("z", 0)])
    assert names(waiting) == ["y", "b", "e", "x", "z", "a", "c", "d"]


def test_the_longest_cached_prefix_goes_first_but_not_before_a_priority() -> None:
    waiting = Waiting()
    for name, priority in [("none", 0), ("some", 0), ("most", 0), ("urgent", 1)]:
        waiting.add(request(name, priority))
    cached = {"none": 0, "some": 10, "most": 90, "urgent": 0}
    assert names(waiting.ordered(lambda r: cached[r.id])) == ["urgent", "most", "some", "none"]


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 50)), min_size=2, max_size=90), st.data())
def test_nobody_is_passed_by_more_often_than_patience_allows(
    given: list[tuple[int, int]], data: st.DataObject
) -> None:
    waiting, cached = Waiting(), {}
    for i, (priority, found) in enumerate(given):
        each = request(str(i), priority)
        each.passed = data.draw(st.integers(0, 2)) * PATIENCE // 2
        waiting.add(each)
        cached[each.id] = found
    order = waiting.ordered(lambda r: cached[r.id])
    assert len(order) == min(len(given), WINDOW) and len(set(map(id, order))) == len(order)
    assert [r.priority for r in order] == sorted((r.priority for r in order), reverse=True)
    first = order[0]
    older = [r for r in waiting if r.passed >= PATIENCE and r.priority == first.priority]
    if older and older[0] in order:
        assert first is older[0], "one whose patience is at its end doesn't go first"
    before = {id(r): r.passed for r in waiting}
    ahead = list(waiting)[: list(waiting).index(first)]
    waiting.passed_by(first)
    assert [r for r in waiting if r.passed > before[id(r)]] == ahead


def ids(seed: int, length: int) -> Ints:
    return np.random.default_rng(seed).integers(0, 60, length).astype(np.int32)


async def ended_before(big: Ints, streams: int, **settings: int) -> int:
    """How many others ended before a request of `big` did, in an engine where there are always more that
    share a cached prefix."""
    engine = EmbeddedEngine(copied(Kind(), 0), EmbeddedConfig(**settings), VERSION, SystemClock(), NullSink())
    await engine.start()
    shared, ended, over = ids(0, 30), 0, asyncio.Event()

    async def stream(number: int) -> None:
        nonlocal ended
        prompt, sampling = np.concatenate([shared, ids(1 + number, 3)]), Sampling(max_tokens=5 + number)
        for turn in range(100):
            await engine.generate(prompt, sampling, request=f"{number}/{turn}")
            ended += not over.is_set()
            if over.is_set():
                return

    others = [asyncio.create_task(stream(number)) for number in range(streams)]
    for _ in range(30):
        await asyncio.sleep(0)
    ended = 0
    done = await engine.generate(big, Sampling(max_tokens=2), request="big")
    over.set()
    assert len(done.tokens) == 2
    await asyncio.gather(*others)
    engine.check_integrity()
    await engine.close()
    return ended


@pytest.mark.parametrize("length", [8, 60])
async def test_a_request_without_cached_prefix_gets_its_turn(length: int) -> None:
    assert await ended_before(ids(7, length), 4, max_batch=2) <= PATIENCE + 4


async def test_a_request_that_needs_the_whole_cache_gets_its_turn() -> None:
    ended = await ended_before(ids(7, 60), 4, max_batch=2, row_tokens=16, kv_tokens=64)
    assert ended <= PATIENCE + 8, f"{ended} others went before it"


async def test_a_higher_priority_goes_first_through_the_engine() -> None:
    engine = EmbeddedEngine(
        copied(Kind(), 0), EmbeddedConfig(max_batch=1), VERSION, SystemClock(), NullSink()
    )
    await engine.start()
    order: list[int] = []

    async def say(number: int, priority: int) -> None:
        await engine.generate(ids(number, 9), Sampling(max_tokens=3), request=str(number), priority=priority)
        order.append(number)

    await asyncio.gather(*(say(i, priority) for i, priority in enumerate([0, -1, 2, 0, 1, 2])))
    await engine.close()
    assert order == [2, 5, 4, 0, 3, 1]
