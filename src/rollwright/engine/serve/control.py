"""The control port: pause, resume, new weights, abort anything.

Role: the routes that a trainer uses. Neighbours: `app` serves them behind a token of their own, `desk` does
the work. Invariants: weights are named, never sent; calls that may take long answer as events, so that the
caller can tell a long wait from a dead server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping

import msgspec

from rollwright.engine.base import InFlight, PauseMode
from rollwright.engine.serve.app import Answer, Events, Handler, Plain, one, read
from rollwright.engine.serve.bridge import Bridge
from rollwright.engine.serve.wire import AbortRequest, Done, PauseRequest, UpdateRequest


class Control:
    """Routes over `desk`."""

    def __init__(self, desk: Bridge) -> None:
        self._desk = desk

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """By method and path."""
        return {
            ("POST", "/control/v1/pause"): self._pause,
            ("POST", "/control/v1/resume"): self._resume,
            ("POST", "/control/v1/update"): self._update,
            ("POST", "/control/v1/abort"): self._abort,
            ("GET", "/health"): self._health,
        }

    async def _pause(self, body: bytes) -> AsyncIterator[Answer]:
        mode = PauseMode(read(PauseRequest, body).mode)

        async def pause() -> Done:
            return Done(held=await self._desk.pause(mode))

        yield _long(pause())

    async def _resume(self, body: bytes) -> AsyncIterator[Answer]:
        await self._desk.resume()
        yield _done()

    async def _update(self, body: bytes) -> AsyncIterator[Answer]:
        request = read(UpdateRequest, body)
        InFlight(request.in_flight)

        async def update() -> Done:
            return Done(gap=await self._desk.update(request))

        yield _long(update())

    async def _abort(self, body: bytes) -> AsyncIterator[Answer]:
        await self._desk.abort(read(AbortRequest, body).requests, None)
        yield _done()

    async def _health(self, body: bytes) -> AsyncIterator[Answer]:
        yield Plain(msgspec.json.encode(await self._desk.health()))


def _long(work: Awaitable[Done]) -> Events:
    return Events(one(work))


def _done() -> Plain:
    return Plain(msgspec.json.encode(Done()))
