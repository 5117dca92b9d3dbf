"""HTTP: from a request to a handler and back, for one port.

Role: an ASGI application: token, size limit, JSON, events, errors. Neighbours: `public` and `control` give
the routes; `server` runs it in uvicorn. Invariants: nothing is read of a request without the token; a client
that goes away has its work cancelled; every failure is a JSON body with the name of its error; a stream that
is silent sends a comment every few seconds, so that a client can tell a long wait from a dead server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rollwright.clock import Clock, let_go
from rollwright.engine.serve.auth import Token
from rollwright.engine.serve.wire import Failed, Failure
from rollwright.errors import RollwrightError
from rollwright.events import Noted, Sink

BEAT_SECONDS = 5.0
"""A silent stream says this often that it lives."""
BODY_SECONDS = 30.0
"""How long a client may take to send its request."""
PAST = 8
"""How many times the limit is read past, at most."""
JSON = "application/json"

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
T = TypeVar("T")


@dataclass(frozen=True)
class Plain:
    """An answer that is ready."""

    body: bytes
    content_type: str = JSON


@dataclass(frozen=True)
class Events:
    """An answer in pieces, each the data of one event; `end` is the last event."""

    pieces: AsyncIterator[bytes]
    end: bytes = b"[DONE]"


Answer = Plain | Events
Handler = Callable[[bytes], AsyncIterator[Answer]]
"""Body → one answer, yielded from a context that lives until it is written."""


class Refused(RollwrightError):
    """A request that HTTP itself has a status for."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


_STATUS = {
    "EngineClosed": 503,
    "Busy": 429,
    "WeightMismatch": 409,
    "MissingExtra": 501,
    "StoreError": 409,
    "SchemaError": 400,
}


class App:
    """The routes of one port, behind its token. `limit` is the largest body in bytes."""

    def __init__(
        self,
        token: Token,
        routes: Mapping[tuple[str, str], Handler],
        clock: Clock,
        events: Sink,
        limit: int = 16 << 20,
    ) -> None:
        self._token, self._routes, self._clock, self._events = token, routes, clock, events
        self._limit = limit

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http":
            return
        writer = _Writer(send)
        try:
            handler = self._route(scope)
            body = await self._body(scope, receive)
        except RollwrightError as error:
            if getattr(error, "status", None) == 413:
                await self._discard(receive)
            await writer.failed(error)
            return
        work: asyncio.Future[None] = asyncio.ensure_future(self._answer(handler, body, writer))
        gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            await let_go(self._clock, work)

    def _route(self, scope: Mapping[str, Any]) -> Handler:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not self._token.admits(headers.get(b"authorization", b"")):
            raise Refused(401, "this port asks for its token: Authorization: Bearer TOKEN")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > self._limit:
            raise self._too_large()
        method, path = scope["method"], scope["path"]
        if handler := self._routes.get((method, path)):
            return handler
        if any(known == path for _, known in self._routes):
            raise Refused(405, f"{path} takes another method than {method}")
        known = ", ".join(f"{each} {where}" for each, where in self._routes)
        raise Refused(404, f"nothing at {path}; this port has {known}")

    async def _body(self, scope: Mapping[str, Any], receive: Receive) -> bytes:
        parts: list[bytes] = []

        async def read() -> None:
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the client went away")
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > self._limit:
                    raise self._too_large()

        try:
            async with asyncio.timeout(BODY_SECONDS):
                await read()
        except TimeoutError as error:
            raise Refused(
                408, f"the body of {scope['path']} did not come within {BODY_SECONDS:g} s"
            ) from error
        return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Read past a body that is too large, within bounds: a client that is cut off while it sends would
        not read why."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                size, more = 0, True
                while more and size <= PAST * self._limit:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message["type"] == "http.request" and message.get("more_body", False)

    def _too_large(self) -> Refused:
        return Refused(413, f"a request of more than {self._limit:,} bytes is not read")

    async def _answer(self, handler: Handler, body: bytes, writer: _Writer) -> None:
        answers = handler(body)
        try:
            answer = await anext(answers)
            if isinstance(answer, Plain):
                await writer.whole(200, answer.body, answer.content_type)
            else:
                await self._stream(answer, writer)
        except Exception as error:  # boundary: whatever a handler raises is the client's answer
            if not isinstance(error, RollwrightError | ValueError):
                self._events.emit(Noted(level="error", text=f"a request failed: {error!r}"))
            await writer.failed(error)
        finally:
            await answers.aclose()  # type: ignore[attr-defined]  # handlers are generators

    async def _stream(self, answer: Events, writer: _Writer) -> None:
        await writer.open()
        beat: asyncio.Future[Any] = asyncio.ensure_future(self._clock.sleep(BEAT_SECONDS))
        step: asyncio.Future[Any] | None = None
        try:
            while True:
                step = step or asyncio.ensure_future(_next(answer.pieces))
                if not step.done():
                    await asyncio.wait({step, beat}, return_when=asyncio.FIRST_COMPLETED)
                if step.done():
                    data, step = step.result(), None
                    if data is None:
                        break
                    await writer.event(data)
                if beat.done():
                    await writer.comment("beat")
                    beat = asyncio.ensure_future(self._clock.sleep(BEAT_SECONDS))
            await writer.event(answer.end, last=True)
        finally:
            beat.cancel()
            if step is not None:
                await let_go(self._clock, step)


class _Writer:
    """Writes one response; knows how far it is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def whole(self, status: int, body: bytes, content_type: str) -> None:
        """Everything at once."""
        self._begun = True
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        if status in (401, 408, 413):  # the body may not have been read: this connection is of no more use
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def open(self) -> None:
        """The head of a stream, and a first comment: the request was taken."""
        self._begun = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.comment("accepted")

    async def event(self, data: bytes, *, last: bool = False) -> None:
        """One event; the last one ends the response."""
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def comment(self, text: str) -> None:
        """Something that clients overread."""
        body = f": {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def failed(self, error: Exception) -> None:
        """`error` as the answer, or as the last event of it."""
        body = msgspec.json.encode(Failed(error=failure(error)))
        if self._begun:
            await self.event(body, last=True)
        else:
            await self.whole(_status(error), body, JSON)


def failure(error: Exception) -> Failure:
    """How an error is told to a client; of one that isn't foreseen only its name."""
    if isinstance(error, RollwrightError | ValueError):
        kind = type(error).__name__ if isinstance(error, RollwrightError) else "ValueError"
        return Failure(type=kind, message=str(error))
    return Failure(type="EngineError", message=f"the server failed: {type(error).__name__}")


def _status(error: Exception) -> int:
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, ValueError):
        return 400
    return _STATUS.get(type(error).__name__, 500)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


def read(kind: type[T], body: bytes) -> T:
    """The record that a client sent.

    Raises:
        Refused: it is none; the text says where.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"not a request: {error}") from error


async def one(work: Awaitable[Any]) -> AsyncIterator[bytes]:
    """The one piece of an answer that takes long."""
    yield msgspec.json.encode(await work)
