"""`GET /metrics` of a run's engine: what is answered, and what no client can do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollwright.clock import Clock, SystemClock
from rollwright.engine.serve.scrape import CLIENTS, HEAD_BYTES, free, scraped
from rollwright.errors import ConfigError
from rollwright.testing.clock import FakeClock
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.types import PolicyVersion

GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9\r\n\r\n"


def unused() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@asynccontextmanager
async def open_port(clock: Clock | None = None) -> AsyncIterator[int]:
    clock, port = clock or SystemClock(), unused()
    engine = ScriptedEngine(
        lambda prompt: ([], []), version=PolicyVersion(run="r", step=3), vocab=9, context=9
    )
    await engine.start()
    try:
        async with scraped(engine, port, clock):
            yield port
    finally:
        await engine.close()


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_prometheus_reads_it() -> None:
    async with open_port() as port:
        head, _, body = (await ask(port, GET)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and f"Content-Length: {len(body)}".encode() in head
    samples = {s.name: s.value for f in text_string_to_metric_families(body.decode()) for s in f.samples}
    assert samples["rollwright_engine_policy_step"] == 3.0 and samples["rollwright_engine_ready"] == 1.0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:9\r\n\r\n", b"403"),
        (b"\r\n\r\n", b"404"),
    ],
)
async def test_it_only_reads_and_only_by_its_own_name(request_: bytes, status: bytes) -> None:
    async with open_port() as port:
        assert (await ask(port, request_)).split()[1] == status
        assert (await ask(port, GET)).split()[1] == b"200"


async def test_a_client_that_says_too_much_or_nothing_is_left() -> None:
    clock = FakeClock(auto=False)
    async with open_port(clock) as port:
        too_much = ask(port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * HEAD_BYTES)
        assert await asyncio.wait_for(_ended(too_much), 10) == b""
        silent = asyncio.create_task(_ended(ask(port, b"GET /metrics")))
        while not silent.done():
            clock.advance(1.0)
            await asyncio.sleep(0.001)
        assert await silent == b""


async def test_many_silent_clients_are_let_go_at_the_end() -> None:
    async with open_port() as port:
        asked = [asyncio.create_task(_ended(ask(port, b"GET"))) for _ in range(CLIENTS + 4)]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) >= 1  # those beyond the limit
    assert set(await asyncio.gather(*asked)) == {b""}
    free(port)


async def _ended(asked: object) -> bytes:
    """What came before the connection ended, however it did."""
    try:
        return await asked  # type: ignore[misc,no-any-return]
    except ConnectionError:
        return b""


async def test_a_port_that_is_taken_is_one_line() -> None:
    async with open_port() as port:
        with pytest.raises(ConfigError, match=rf"loop\.metrics_port = {port}: .*or 0 for none"):
            free(port)
        engine = ScriptedEngine(lambda prompt: ([], []), version=PolicyVersion(run="r"), vocab=9, context=9)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} "):
            async with scraped(engine, port, SystemClock()):
                pass
    free(port)
    free(0)
