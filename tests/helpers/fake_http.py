"""A small HTTP server for fakes of vendors: real sockets, one handler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

import uvicorn


@dataclass
class Request:
    """One request, read to its end."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Its body."""
        return json.loads(self.body) if self.body else {}

    def upload(self) -> tuple[str, bytes]:
        """File name and contents of a multipart body with one file."""
        boundary = re.search(r"boundary=([^;]+)", self.headers["content-type"])
        assert boundary is not None
        part = self.body.split(b"--" + boundary[1].encode())[1]
        head, _, data = part.partition(b"\r\n\r\n")
        name = re.search(rb'filename="([^"]*)"', head)
        return (unquote(name[1].decode()) if name else ""), data[:-2]


@dataclass
class Response:
    """An answer; a body that is an iterator is sent piece by piece."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Bytes as they go out."""
        if isinstance(self.body, bytes):
            yield self.body
        elif hasattr(self.body, "__aiter__"):
            async for piece in self.body:
                yield piece
        elif self.body is not None:
            yield json.dumps(self.body).encode()


Handler = Callable[[Request], Awaitable[Response]]


class FakeServer:
    """Serves `handle`, and other ASGI applications below their paths. `faults` are statuses that answer the
    next requests instead; where `silent` is set, none is answered."""

    def __init__(self, handle: Handler, mounted: dict[str, Any] | None = None) -> None:
        self._handle, self._mounted = handle, mounted or {}
        self.faults: list[int] = []
        self.silent = False
        self.requests: list[Request] = []
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        while self.silent:  # noqa: ASYNC110 - a dead server says nothing for ever
            await asyncio.sleep(0.05)
        for path, app in self._mounted.items():
            if scope["path"].startswith(path):
                return await app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        path = scope["path"]
        request = Request(scope["method"], path, query, headers, body)
        self.requests.append(request)
        if self.faults:
            status = self.faults.pop(0)
            response = Response(status, {"message": f"fault {status}", "code": status})
        else:
            response = await self._handle(request)
        sent = {"content-type": "application/json", **response.headers}
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            }
        )
        async for piece in response.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeServer]:
        """Up on a port of its own."""

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        config = uvicorn.Config(
            self, port=0, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        server = Quiet(config)
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has a flag for it and no event
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.should_exit = True
            await task
