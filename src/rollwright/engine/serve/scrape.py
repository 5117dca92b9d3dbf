"""`GET /metrics` of an engine that is inside a run.

Role: what Prometheus scrapes of a run's rollout process. Neighbours: `metrics` writes the text, the workers
of a run open it. Invariants: only this machine reaches it, and it only reads; no client, however slow or
wrong, holds anything for longer than `HEAD_SECONDS`; when it is left nothing of it is open.

There is no token: what is told are counters. A page in a browser cannot read them, since a name other than
this machine's own in `Host` is refused.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rollwright.clock import Clock, let_go, within
from rollwright.engine.base import Engine
from rollwright.engine.serve import metrics
from rollwright.errors import ConfigError, DeadlineExceeded, EngineError

LOOPBACK = "127.0.0.1"
HEAD_SECONDS = 5.0
"""How long a client may take for its request, and again for its answer."""
HEAD_BYTES = 8192
CLIENTS = 16
"""Connections at once; more are closed unanswered."""
_OURS = frozenset({LOOPBACK, "localhost"})


def free(port: int) -> None:
    """Whether the port can be listened on; 0 is no port, and always free.

    Raises:
        ConfigError: it is taken.
    """
    if port:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((LOOPBACK, port))
                tried.listen()
            except OSError as error:
                raise _taken(port, error) from error


@asynccontextmanager
async def scraped(engine: Engine, port: int, clock: Clock) -> AsyncIterator[None]:
    """Answer on `port` of loopback while inside; with port 0 not at all.

    Raises:
        ConfigError: the port is taken.
    """
    if not port:
        yield
        return
    clients: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(clients) >= CLIENTS:
            writer.close()
            return
        task = asyncio.create_task(_client(engine, clock, reader, writer))
        clients.add(task)
        task.add_done_callback(clients.discard)

    try:
        server = await asyncio.start_server(connected, LOOPBACK, port, limit=HEAD_BYTES)
    except OSError as error:
        raise _taken(port, error) from error
    try:
        yield
    finally:
        server.close()
        await let_go(clock, *clients)


def _taken(port: int, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    return ConfigError(
        f"loop.metrics_port = {port}: cannot listen on {LOOPBACK}:{port} ({why}): give another, or 0 for none"
    )


async def _client(
    engine: Engine, clock: Clock, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request and its answer; whatever is wrong with either ends the connection only."""
    try:
        head = await within(clock, reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS, "a request for metrics")
        status, body = await _answer(engine, head.decode("latin-1").splitlines())
        lines = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {metrics.CONTENT_TYPE}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        await within(clock, writer.drain(), HEAD_SECONDS, "an answer with metrics")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, DeadlineExceeded):
        pass  # it went away, is too slow, or speaks no HTTP
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _answer(engine: Engine, head: list[str]) -> tuple[str, bytes]:
    """Status and body."""
    method, path, *_ = [*head[0].split(), "", ""]
    hosts = [line.partition(":")[2].strip() for line in head[1:] if line.lower().startswith("host:")]
    if any(host.partition(":")[0].lower() not in _OURS for host in hosts):
        return "403 Forbidden", b"only by this machine's own name\n"
    if path.partition("?")[0] != "/metrics":
        return "404 Not Found", b"/metrics is all there is\n"
    if method != "GET":
        return "405 Method Not Allowed", b"GET is all there is\n"
    try:
        told = metrics.text(await engine.health()).encode()
    except EngineError as error:
        return "503 Service Unavailable", f"{error}\n".encode()
    return "200 OK", told
