"""What takes a replica out and what doesn't: poisoned requests, full servers, errors
of a server that lives."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from opened import until_end
from served import Served
from torch import Tensor

from rollwright.clock import SystemClock
from rollwright.engine import replicas
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.remote.address import Address
from rollwright.engine.remote.engine import RemoteEngine
from rollwright.engine.remote.link import Hung, Link
from rollwright.engine.replicas import Replicas
from rollwright.engine.serve import desk
from rollwright.engine.serve.desk import Busy
from rollwright.errors import EngineClosed, EngineError
from rollwright.events import ListSink, NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.types import Completion, Finish, PolicyVersion, Sampling

VOCAB, POISON = 40, 39
VERSION = PolicyVersion(run="suite")


class Poisoned(Decoder):
    """Breaks in the step that meets one token; may take its time otherwise."""

    pace = 0.0

    def forward(self, ids: Tensor, positions: Tensor, attend: Any, keep: Tensor | None = None) -> Tensor:
        SystemClock().pause(self.pace)
        if (ids == POISON).any():
            raise RuntimeError("poison")
        return super().forward(ids, positions, attend, keep)


def embedded(pace: float = 0.0) -> Engine:
    made = Poisoned(ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn=32, context=256), VOCAB)
    made.initialise(torch.Generator().manual_seed(0))
    made.pace = pace
    return EmbeddedConfig().build(made, VERSION, SystemClock(), NullSink())


def remote(pace: float = 0.0) -> RemoteEngine:
    return RemoteEngine(until_end(Served(lambda: embedded(pace))).address, SystemClock(), NullSink())


@asynccontextmanager
async def started(engines: Sequence[Engine], events: ListSink) -> AsyncIterator[Replicas]:
    several = Replicas(engines, SystemClock(), events, slack=0)
    await several.start()
    try:
        yield several
    finally:
        await several.close()


async def ask(engine: Engine, name: str, ids: Sequence[int] = (1, 2, 3), tokens: int = 4) -> Completion:
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    return await engine.generate(np.array(ids, np.int32), sampling, request=name)


def blamed(events: ListSink) -> list[str]:
    return [str(event) for event in events.events if "gets no traffic" in str(event)]


@contextmanager
def places(count: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desk, "MOST_JOBS", count)
        yield


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("make", [embedded, remote])
async def test_a_request_that_breaks_a_step_breaks_one_replica(make: Any, streamed: bool) -> None:
    events = ListSink()
    async with started([make(), make(), make()], events) as several:
        with pytest.raises(EngineError, match="stopped in a step"):
            if streamed:
                prompt = np.array([1, POISON], np.int32)
                async for _ in several.stream(prompt, Sampling(max_tokens=4), request="bad"):
                    pass
            else:
                await ask(several, "bad", (1, POISON))
        done = await asyncio.gather(*(ask(several, f"good{i}") for i in range(6)))
        assert {each.finish for each in done} == {Finish.LENGTH}
        assert len(blamed(events)) <= 1, "the poison was handed on"


async def test_a_full_replica_is_asked_again_and_never_blamed() -> None:
    events = ListSink()
    with places(1):
        engines = [remote(0.02), remote(0.02)]
        async with started(engines, events) as several:
            done = await asyncio.gather(*(ask(several, f"r{i}") for i in range(5)))
            assert [each.request for each in done] == [f"r{i}" for i in range(5)]
            assert {each.finish for each in done} == {Finish.LENGTH}
            assert not blamed(events) and (await several.health()).ready


async def test_who_has_an_answer_takes_no_place() -> None:
    with places(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "AGAIN_SECONDS", 0.01)
        patch.setattr(replicas, "BUSY_SECONDS", 3.0)
        async with started([remote()], ListSink()) as several:
            said = [len((await ask(several, f"r{i}", tokens=1)).tokens) for i in range(100)]
    assert said == [1] * 100, "an answered request kept its place"


async def test_where_all_are_full_a_request_can_be_aborted_and_gives_up_in_the_end() -> None:
    events, sampling, prompt = ListSink(), Sampling(max_tokens=4), np.array([1], np.int32)
    with places(1):
        async with started([remote(0.02)], events) as several:
            long = asyncio.create_task(ask(several, "long", tokens=250))
            for _ in range(500):
                if (await several.health()).running:
                    break
                await asyncio.sleep(0.01)
            waits = asyncio.create_task(ask(several, "waits"))
            streams = several.stream(prompt, sampling, request="streams")
            streamed = asyncio.ensure_future(anext(streams))
            await asyncio.sleep(0.1)
            with pytest.raises(ValueError, match="in flight"):
                await ask(several, "waits")
            await several.abort(["waits", "streams"])
            assert (await waits).finish is Finish.ABORT and not len((await waits).tokens)
            assert (await streamed).finish is Finish.ABORT and (await streamed).version == VERSION
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(replicas, "BUSY_SECONDS", 0.0)
                with pytest.raises(Busy, match="under way"):
                    await ask(several, "late")
            assert not long.done(), "nothing was full: the test shows nothing"
            await several.abort(["long"])
            assert (await long).finish is Finish.ABORT and not blamed(events)


def script(prompt: tuple[int, ...]) -> tuple[Sequence[int], Sequence[float]]:
    if POISON in prompt:
        raise RuntimeError("no such thing")
    return [4, 5], [-1.0, -1.0]


async def test_an_error_of_a_server_that_lives_is_the_requests_own() -> None:
    served = [until_end(Served(lambda: ScriptedEngine(script, version=VERSION, vocab=VOCAB))) for _ in "ab"]
    engines = [RemoteEngine(each.address, SystemClock(), NullSink()) for each in served]
    events = ListSink()
    async with started(engines, events) as several:
        with pytest.raises(EngineError, match="the server failed: RuntimeError"):
            await ask(several, "bad", (1, POISON))
        with pytest.raises(ValueError):
            await ask(several, "worse", (1, VOCAB + 7))
        for i in range(4):
            assert (await ask(several, f"r{i}", tokens=2)).tokens.tolist() == [4, 5]
        assert not blamed(events)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, b'{"error": {"type": "Busy", "message": "full"}}', Busy),
        (503, b"Service Unavailable", Busy),
        (503, b'{"error": {"type": "EngineClosed", "message": "stopping"}}', EngineClosed),
        (502, b"<html>Bad Gateway</html>", EngineClosed),
        (500, b"", EngineError),
        (0, b"", Hung),
    ],
)
async def test_what_an_answer_says_of_its_server(status: int, body: bytes, kind: type[Exception]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            if status:
                head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
            await reader.read()
        finally:
            writer.close()
            over.set()

    over = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = Link(Address(url, "t" * 16), SystemClock(), 0.3)
    link.open()
    try:
        with pytest.raises(kind) as found:
            await link.post("/v1/score", {})
        assert type(found.value) is kind and not isinstance(found.value, httpx.HTTPError)
    finally:
        await link.close()
        await over.wait()
        server.close()
        await server.wait_closed()
