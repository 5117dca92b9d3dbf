"""One request to a served engine, from its caller's side.

Role: reads the events of one answer, so that whoever waits can also be told that the engine was closed.
Neighbours: `engine` opens flights, `link` carries them. Invariant: a flight ends once, with an answer, an
error, or its caller's leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from rollwright.engine.remote.link import Link
from rollwright.engine.serve.wire import GenerateRequest

PATH = "/inference/v1/generate"


class Flight:
    """`request` under way."""

    def __init__(self, link: Link, request: GenerateRequest) -> None:
        self.name = request.request_id
        self.accepted = asyncio.Event()
        """The server has taken it, or it has ended."""
        self.read = asyncio.Event()
        """The answer is here whole, or will not come."""
        self.left = asyncio.Event()
        """Its caller has what there is."""
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._read(link, request))

    @property
    def whole(self) -> bool:
        """Whether the answer came whole."""
        return self.read.is_set() and self._error is None and not self._task.cancelled()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The events, as they come.

        Raises:
            Exception: what the engine, or the way to it, ended it with.
        """
        while True:
            data = await self._arrived.get()
            if self._error is not None:
                raise self._error
            if data is None:
                return
            yield data

    def fail(self, error: Exception) -> None:
        """End it: its caller gets `error` next, whatever has arrived."""
        if not self.whole:
            self._error = self._error or error
            self._end()
            self._task.cancel()

    async def stop(self) -> None:
        """Close the connection. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, link: Link, request: GenerateRequest) -> None:
        try:
            events = link.events(PATH, request, accepted=self.accepted.set)
            async with aclosing(cast(Any, events)) as pieces:
                async for data in pieces:
                    self._arrived.put_nowait(data)
        except Exception as error:  # boundary: whatever ends it is its caller's to hear
            self._error = self._error or error
        finally:
            self._end()

    def _end(self) -> None:
        self._arrived.put_nowait(None)
        self.accepted.set()
        self.read.set()
