"""HTTP to a served engine: calls, event streams, and what a failure of either means.

Role: everything that knows httpx. Neighbours: `engine` speaks through it. Invariants: every wait ends: a
server that says nothing for `silence` seconds, not even that it lives, counts as hung; only what never
reached the server, or may be asked twice, is sent again, a few times at most; every failure is an error of
`rollwright.errors` with its cause.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rollwright.clock import Clock
from rollwright.engine.remote.address import Address
from rollwright.engine.serve.desk import Busy
from rollwright.engine.serve.wire import Failed, Failure
from rollwright.errors import (
    ConstraintError,
    ContextOverflow,
    EngineClosed,
    EngineError,
    MissingExtra,
    WeightMismatch,
)

if TYPE_CHECKING:
    import httpx

TRIES = 3
"""How often something is sent at most."""
AGAIN_SECONDS = 0.1
CONNECT_SECONDS = 5.0
KEEP_SECONDS = 20.0
"""How long an idle connection is kept; shorter than servers keep theirs."""

_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        Busy,
        EngineClosed,
        EngineError,
        ContextOverflow,
        ConstraintError,
        WeightMismatch,
        ValueError,
    )
}

_BARE = {429: "Busy", 503: "Busy", 502: "EngineClosed", 504: "EngineClosed"}
"""What a status means whose body isn't ours: too many connections, or a proxy whose server is gone."""

T = TypeVar("T")


class Unreached(EngineClosed):
    """There is no server at that address; nothing was sent."""


class Lost(EngineClosed):
    """The connection broke before the answer was whole."""


class Hung(EngineClosed):
    """The server said nothing for too long."""


class Link:
    """Both ports of the server at `address`."""

    def __init__(self, address: Address, clock: Clock, silence: float) -> None:
        self._address, self._clock, self._silence = address, clock, silence
        self._client: httpx.AsyncClient | None = None

    def open(self) -> None:
        """Idempotent. Raises `MissingExtra` without httpx."""
        if self._client is not None:
            return
        httpx = _httpx()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(self._silence, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_SECONDS
            ),
            trust_env=False,  # tokens go to no proxy
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def get(self, path: str) -> bytes:
        """The body at `path` of the public port."""
        return await self._again(lambda: self._whole("GET", path, b"", control=False), also=(Lost,))

    async def post(self, path: str, record: Any, *, control: bool = False, repeatable: bool = False) -> bytes:
        """The answer to `record`. `repeatable`: asking twice does no harm, so a broken connection is no
        end."""
        body = msgspec.json.encode(record)
        also = (Lost,) if repeatable else ()
        return await self._again(lambda: self._whole("POST", path, body, control=control), also=also)

    async def last(self, path: str, record: Any, *, control: bool = False) -> bytes:
        """The one event of an answer that may take long."""
        found = None
        async for data in self.events(path, record, control=control):
            found = data
        if found is None:
            raise Lost(f"{self._at(control)}{path} ended without an answer")
        return found

    async def events(
        self,
        path: str,
        record: Any,
        *,
        control: bool = False,
        accepted: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[bytes]:
        """The data of each event of the answer to `record`; `accepted` is called when the server has taken
        it. Closing the iterator closes the connection, by which the server ends its work."""
        body, ended = msgspec.json.encode(record), False

        async def begin() -> Any:
            client = self._ready()
            request = client.build_request(
                "POST", self._at(control) + path, content=body, headers=self._headers(control)
            )
            return await client.send(request, stream=True)

        async with self._told(path, control):
            response = await self._again(begin)
            try:
                if response.status_code != 200:
                    raise _error(await response.aread(), response.status_code)
                async for line in response.aiter_lines():
                    if line == ": accepted":
                        accepted()
                    if not line.startswith("data: "):
                        continue
                    data = line[6:]
                    if data == "[DONE]":
                        ended = True
                        break
                    if data.startswith('{"error":'):
                        raise _error(data.encode(), 200)
                    yield data.encode()
                if not ended:
                    raise Lost(f"{self._at(control)}{path}: the server went away before the answer was whole")
            finally:
                await response.aclose()

    async def _whole(self, method: str, path: str, body: bytes, *, control: bool) -> bytes:
        async with self._told(path, control):
            response = await self._ready().request(
                method, self._at(control) + path, content=body or None, headers=self._headers(control)
            )
        if response.status_code != 200:
            raise _error(response.content, response.status_code)
        return bytes(response.content)

    async def _again(self, once: Callable[[], Awaitable[T]], also: tuple[type[EngineClosed], ...] = ()) -> T:
        for left in range(TRIES - 1, -1, -1):
            try:
                async with self._told("", False):
                    return await once()
            except EngineClosed as error:
                if not left or not isinstance(error, (Unreached, *also)):
                    raise
                await self._clock.sleep(AGAIN_SECONDS)
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _told(self, path: str, control: bool) -> AsyncIterator[None]:
        """httpx's errors as ours."""
        httpx, where = _httpx(), self._at(control) + path
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreached(f"no server answers at {where}: {error}") from error
        except httpx.TimeoutException as error:
            raise Hung(f"{where} said nothing for {self._silence:g} s: the server hangs") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Lost(f"the connection to {where} broke: {error or type(error).__name__}") from error
        except RuntimeError as error:  # httpx: the client was closed meanwhile
            if self._client is not None:
                raise
            raise EngineClosed("the engine was closed while the request waited") from error

    def _ready(self) -> httpx.AsyncClient:
        if self._client is None:
            raise EngineClosed("the engine takes nothing more: it is closed, or was not started")
        return self._client

    def _at(self, control: bool) -> str:
        if control and not self._address.control_url:
            raise EngineError(
                f"the engine at {self._address.url} cannot be controlled: its control port is unknown"
            )
        return self._address.control_url if control else self._address.url

    def _headers(self, control: bool) -> dict[str, str]:
        token = self._address.control_token if control else self._address.token
        return {"authorization": f"Bearer {token}", "content-type": "application/json"}


def _error(body: bytes, status: int) -> Exception:
    """The error that a server told."""
    try:
        told = msgspec.json.decode(body, type=Failed).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = Failure(
            type=_BARE.get(status, "EngineError"),
            message=f"status {status} without a reason; is it rollwright's?",
        )
    if status == 401:
        return EngineError("the server refused the token: give the one that it was started with")
    kind = _ERRORS.get(told.type)
    if kind is None:
        return EngineError(f"{told.type}: {told.message}")
    return kind(told.message)


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra("an engine in another process", "serve") from error
    return httpx
