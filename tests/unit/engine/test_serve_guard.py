"""Clients that do nothing: half a head, an answer that isn't read, more connections than there may be."""

import asyncio
import json
import socket
from collections.abc import Sequence

import pytest
from opened import until_end
from served import Served

from rollwright.engine.serve import bridge, front, guard
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.types import PolicyVersion

VERSION = PolicyVersion(run="r")
LONG, LINES = 3000, 6
HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bearer public-token-of-a-test\r\n"


def script(prompt: tuple[int, ...]) -> tuple[Sequence[int], Sequence[float]]:
    return [7] * LONG, [-1.0] * LONG


def serve() -> Served:
    return until_end(Served(lambda: ScriptedEngine(script, version=VERSION, context=2 * LONG)))


async def connected(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = served.address.url.removeprefix("http://").partition(":")
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
    return await asyncio.open_connection(sock=own, limit=1 << 14)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection."""
    said = bytearray()
    try:
        async with asyncio.timeout(8):
            while data := await reader.read(1 << 16):
                said += data
    except ConnectionResetError:
        pass
    return bytes(said)


@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD + b"\r\n" + HEAD, HEAD + b"\r\n"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(front, "IDLE_SECONDS", 1)
    reader, writer = await connected(serve())
    try:
        writer.write(sent)
        said = await ended(reader)
        assert said.count(b"HTTP/1.1 200") == (1 if b"\r\n\r\n" in sent else 0)
    finally:
        writer.close()


async def test_a_head_in_drops_has_no_more_time_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.2)
    reader, writer = await connected(serve())
    task = asyncio.create_task(ended(reader))
    try:
        for _ in range(400):
            if task.done():
                break
            writer.write(b"G")
            await asyncio.sleep(0.02)
        assert await asyncio.wait_for(task, 5) == b"", "it was let drop on"
    finally:
        writer.close()


async def test_connections_have_a_bound_and_those_that_are_there_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS", 3)
    monkeypatch.setattr(guard, "SPARE", 1)
    served = serve()
    pairs = [await connected(served) for _ in range(7)]
    try:
        for reader, _ in pairs[4:]:
            assert await ended(reader) == b""
        for number, (reader, writer) in enumerate(pairs[:4]):
            writer.write(HEAD + b"connection: close\r\n\r\n")
            status = await asyncio.wait_for(reader.readline(), 5)
            assert status.split()[1] == (b"503" if number < 2 else b"200")
            await ended(reader)
    finally:
        for _, writer in pairs:
            writer.close()


def asked(**params: object) -> bytes:
    wire = {"token_ids": [1], "stream": True, "sampling_params": params}
    body = json.dumps(wire).encode()
    head = HEAD.replace(b"GET /health", b"POST /inference/v1/generate")
    head += b"connection: close\r\n"
    return head + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body


async def unread(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream whose client takes next to nothing; it is longer than what the kernel holds."""
    reader, writer = await connected(served)
    writer.write(asked(max_tokens=LONG, n=LINES))
    await reader.readuntil(b"accepted")
    return reader, writer


async def test_an_answer_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "READ_SECONDS", 0.2)
    served = serve()
    reader, writer = await unread(served)
    try:
        ports = served.server._front
        assert ports is not None
        for _ in range(400):
            if not ports._servers[0].server_state.connections:
                break
            await asyncio.sleep(0.02)
        assert b"[DONE]" not in await ended(reader)
    finally:
        writer.close()


async def test_an_answer_that_is_read_slowly_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "READ_SECONDS", 1.5)
    reader, writer = await unread(serve())
    try:
        said = b""
        for _ in range(50):  # longer than the bound, and never silent for so long
            said += await reader.read(4096)
            await asyncio.sleep(0.04)
        assert (said + await ended(reader)).rstrip(b"\r\n0").endswith(b"[DONE]")
    finally:
        writer.close()


async def test_pieces_that_nobody_takes_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "BEHIND", 50)
    served = serve()
    reader, writer = await unread(served)
    try:
        before = -1
        while before < (now := served.sampled()):  # until nothing is made any more
            before = now
            await asyncio.sleep(0.5)
        assert 0 < now < LINES * LONG, "all of it was made for nobody"
        said = await ended(reader)
        assert b"does not read" in said and b"[DONE]" not in said
    finally:
        writer.close()
