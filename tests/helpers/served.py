"""A real server on loopback, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.remote.address import Address
from rollwright.engine.serve.auth import Token
from rollwright.engine.serve.completions import TextModel
from rollwright.engine.serve.server import Keys, Ports, Server
from rollwright.engine.serve.weights import WeightsFolder
from rollwright.events import NullSink


class Served:
    """Serves what `make` makes; `close` ends it, `kill` cuts it off as a dead process would."""

    def __init__(
        self, make: Callable[[], Engine], weights: Path | None = None, text: TextModel | None = None
    ) -> None:
        self._make, self._weights, self._text = make, weights, text
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20), "the server did not start"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._error = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = self._make()
        self.server = Server(
            self.engine,
            Keys(public=Token("public-token-of-a-test"), control=Token("control-token-of-a-test")),
            SystemClock(),
            NullSink(),
            text=self._text,
            weights=None if self._weights is None else WeightsFolder(self._weights),
        )
        await self.server.start(Ports())
        self.address = Address(
            url=self.server.url,
            token="public-token-of-a-test",
            control_url=self.server.control_url,
            control_token="control-token-of-a-test",
        )
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await self.server.stop(0.0)

    def sampled(self) -> int:
        """Tokens that the engine has sampled so far."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self.engine.health(), self._loop).result(20).sampled_tokens

    def close(self) -> None:
        """Stop serving and wait for it."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"
        if self._error is not None:
            raise self._error
