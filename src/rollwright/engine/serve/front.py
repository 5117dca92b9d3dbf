"""uvicorn in a thread: the ports' event loop.

Role: runs the applications of both ports. Neighbours: `server` starts and stops it from the engine's loop,
`guard` is one connection.
Invariant: when `stop` returns, nothing of it runs.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollwright.clock import Clock
from rollwright.engine.serve.app import App
from rollwright.errors import EngineError

if TYPE_CHECKING:
    import uvicorn

START_SECONDS = 30.0
IDLE_SECONDS = 60
"""How long a connection is kept without a request; longer than clients of ours keep theirs."""
HEAD_BYTES = 16 << 10
"""Longest head of a request."""
WRITE_SECONDS = 2
"""How long answers that are made may take to be sent when the server stops."""


class Front:
    """Serves each of `apps` on its socket."""

    def __init__(self, apps: Sequence[App], sockets: Sequence[socket.socket], clock: Clock) -> None:
        self._clock = clock
        self._pairs = list(zip(apps, sockets, strict=True))
        self._servers: list[uvicorn.Server] = []
        self._error: BaseException | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollwright-serve", daemon=True)

    async def start(self) -> None:
        """Return when both ports answer.

        Raises:
            EngineError: they don't.
        """
        self._thread.start()
        up = await asyncio.to_thread(self._up.wait, START_SECONDS)
        if self._error is not None or not up:
            raise EngineError(f"the ports did not start: {self._error or 'no answer'}") from self._error

    async def stop(self) -> None:
        """Close the ports; whatever is still unanswered then is dropped."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.to_thread(self._thread.join, START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # boundary: a thread's errors are told where it was started
            self._error = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._servers = [_server(app) for app, _ in self._pairs]
        tasks = [
            asyncio.create_task(server.serve([bound]))
            for server, (_, bound) in zip(self._servers, self._pairs, strict=True)
        ]
        await asyncio.gather(self._announce(tasks), *tasks)

    async def _announce(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Say that both are up; uvicorn has a flag for it and no event."""
        while not all(server.started for server in self._servers):
            if any(task.done() for task in tasks):
                return
            await self._clock.sleep(0.002)
        self._up.set()


def _server(app: App) -> uvicorn.Server:
    """uvicorn, without its own logging and signal handlers: what happens at a signal is ours to say."""
    import uvicorn

    from rollwright.engine.serve.guard import CONNECTIONS, Guarded

    class Quiet(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=Guarded,
        loop="none",
        server_header=False,
        limit_concurrency=CONNECTIONS,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=WRITE_SECONDS,
    )
    return Quiet(config)
