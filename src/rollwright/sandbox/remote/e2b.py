"""E2B, and services that speak its API.

Role: `Vendor` and `Machine` over the SDK `e2b`. Neighbours: `provider`, `config`. Invariants: the key
comes from E2B_API_KEY and is in no text that leaves this file; every call has a timeout; the SDK's own
retries are off.

Its machines are Firecracker microVMs, each with a kernel of its own. Live fork copies a machine with its
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollwright.errors import MissingExtra, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.remote.adapter import Busy, Machine, Owned, Ran, Unreachable

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

KEY = "E2B_API_KEY"
_OUTPUT_BYTES = 4 * 2**20
"""Of a command's output: our own commands print less, the agent's are capped before."""
_FORKS = 20
"""The most copies that E2B makes at once."""


class _Flood(Exception):
    """A command printed more than ours ever do."""


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """The SDK's exceptions as ours."""
    import e2b
    import httpx
    import pyqwest

    broken = (pyqwest.ReadError, pyqwest.WriteError, pyqwest.StreamError)
    try:
        yield
    except SandboxError:
        raise
    except (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException) as error:
        raise SandboxLost(f"{what}: {_said(error)}") from None
    except (e2b.RateLimitException, e2b.ServiceBusyException) as error:
        raise Busy(f"{what}: {_said(error)}") from None
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"{what}: {_said(error)}. Set {KEY} to a key of your team") from None
    except (e2b.TimeoutException, httpx.HTTPError, OSError, *broken) as error:
        raise Unreachable(f"{what}: {_said(error)}") from None
    except e2b.TemplateException as error:
        raise SandboxUnavailable(f"{what}: {_said(error)}. Build the template again") from None
    except e2b.SandboxException as error:
        status = error.status_code or 0
        if status >= 500:
            raise Unreachable(f"{what}: {_said(error)}") from None
        if status in (400, 403, 404):
            raise SandboxUnavailable(
                f"{what}: {_said(error)}. Check template, time limits and rights of your plan"
            ) from None
        raise SandboxError(f"{what}: {_said(error)}") from None
    except Exception as error:  # boundary: the SDK raises bare `Exception` too
        raise SandboxError(f"{what}: {type(error).__name__}: {_said(error)}") from None


def _said(error: BaseException) -> str:
    """What an exception says, without the key; its own chain may hold it, so it is not kept."""
    text, key = str(error)[:2000], os.environ.get(KEY)
    return text.replace(key, "…") if key else text


_leaving: set[asyncio.Task[None]] = set()


def _disconnect(opening: asyncio.Future[AsyncCommandHandle[None]]) -> None:
    """Let go of a command that nobody waits for; the vendor's timeout bounds it."""
    if not opening.cancelled() and opening.exception() is None:
        leaving = asyncio.ensure_future(opening.result().disconnect())
        _leaving.add(leaving)
        leaving.add_done_callback(_leaving.discard)


class E2BMachine:
    """See `Machine`, `Pausable`, `Forkable`."""

    def __init__(self, sandbox: AsyncSandbox, lease_seconds: float) -> None:
        self.id = sandbox.sandbox_id
        self._sandbox, self._lease = sandbox, lease_seconds

    async def run(self, line: str, *, timeout: float) -> Ran:
        from e2b import CommandExitException

        out: list[str] = []
        left = _OUTPUT_BYTES

        def keep(piece: str) -> None:
            nonlocal left
            left -= len(piece)
            if left < 0:
                raise _Flood(f"more than {_OUTPUT_BYTES} characters of output")
            out.append(piece)

        with _translated(f"a command on {self.id}"):
            opening = asyncio.ensure_future(
                self._sandbox.commands.run(
                    line,
                    background=True,
                    on_stdout=keep,
                    timeout=timeout,
                    request_timeout=timeout,
                    retain_output=False,
                )
            )
            try:
                handle = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_disconnect)  # the SDK leaves a task behind if cut off here
                raise
            try:
                code = (await handle.wait()).exit_code
            except CommandExitException as error:
                code = error.exit_code
            except _Flood:
                await handle.kill()
                raise
            finally:
                await handle.disconnect()
            return Ran("".join(out), "", code)

    async def read(self, path: str, limit: int, *, timeout: float) -> bytes:
        data = bytearray()
        with _translated(f"reading from {self.id}"):
            stream = await self._sandbox.files.read(path, format="stream", request_timeout=timeout)
            async with stream:
                async for piece in stream:
                    data += piece
                    if len(data) > limit:
                        raise SandboxError(f"{path} on {self.id} has more than the {limit} bytes announced")
        return bytes(data)

    async def write(self, path: str, data: bytes, *, timeout: float) -> None:
        with _translated(f"writing to {self.id}"):
            await self._sandbox.files.write(path, data, request_timeout=timeout)

    async def set_timeout(self, seconds: float, *, timeout: float) -> None:
        with _translated(f"setting the timeout of {self.id}"):
            await self._sandbox.set_timeout(math.ceil(seconds), request_timeout=timeout)

    async def kill(self, *, timeout: float) -> None:
        with _translated(f"killing {self.id}"):
            await self._sandbox.kill(request_timeout=timeout)

    async def alive(self, *, timeout: float) -> bool:
        try:
            with _translated(f"asking for {self.id}"):
                await self._sandbox.get_info(request_timeout=timeout)
        except SandboxLost:
            return False
        return True

    async def pause(self, *, timeout: float) -> None:
        with _translated(f"pausing {self.id}"):
            await self._sandbox.pause(request_timeout=timeout)

    async def resume(self, *, timeout: float) -> None:
        with _translated(f"resuming {self.id}"):
            await self._sandbox.connect(timeout=math.ceil(self._lease), request_timeout=timeout)

    async def fork(self, count: int, seconds: float, *, timeout: float) -> Sequence[Machine]:
        made: list[Machine] = []
        failure: Exception | None = None
        with _translated(f"forking {self.id}"):
            while len(made) < count and failure is None:
                wanted = min(count - len(made), _FORKS)
                for each in await self._sandbox.fork(
                    timeout=math.ceil(seconds), count=wanted, request_timeout=timeout
                ):
                    if isinstance(each, Exception):
                        failure = each
                    else:
                        made.append(E2BMachine(each, self._lease))
            if failure is not None:
                for machine in made:
                    await machine.kill(timeout=timeout)
                raise failure
        return made


class E2B:
    """See `Vendor`."""

    name = "e2b"
    isolation = "E2B: a Firecracker microVM each"
    denies_network = True

    def __init__(
        self,
        *,
        template: str,
        internet: bool,
        lease_seconds: float,
        domain: str = "",
        api_url: str = "",
        sandbox_url: str = "",
    ) -> None:
        self.networks: Sequence[str] = ("internet",) if internet else ()
        self._template, self._lease = template, lease_seconds
        given = {"domain": domain, "api_url": api_url, "sandbox_url": sandbox_url}
        self._connection: dict[str, Any] = {name: value for name, value in given.items() if value}
        self._connection["retries"] = 0

    @property
    def targets(self) -> Sequence[tuple[str, int]]:
        from e2b import ConnectionConfig

        url = urlsplit(ConnectionConfig(**self._connection).api_url)
        return ((url.hostname or "", url.port or (80 if url.scheme == "http" else 443)),)

    async def open(self) -> None:
        try:
            import e2b  # noqa: F401
        except ImportError as error:
            raise MissingExtra("the sandbox backend 'e2b'", "e2b") from error
        if not os.environ.get(KEY):
            raise SandboxUnavailable(f"the sandbox backend 'e2b' needs a key: set {KEY}")

    async def create(
        self, labels: Mapping[str, str], network: str, seconds: float, key: str, *, timeout: float
    ) -> Machine:
        from e2b import AsyncSandbox

        with _translated(f"making a sandbox of template '{self._template}'"):
            sandbox = await AsyncSandbox.create(
                template=self._template,
                timeout=math.ceil(seconds),
                metadata=dict(labels),
                allow_internet_access=network == "internet",
                idempotency_key=key,
                request_timeout=timeout,
                **self._connection,
            )
        return E2BMachine(sandbox, self._lease)

    async def kill(self, id: str, *, timeout: float) -> None:
        from e2b import AsyncSandbox

        with _translated(f"killing {id}"):
            await AsyncSandbox.kill(sandbox_id=id, request_timeout=timeout, **self._connection)

    async def owned(self, labels: Mapping[str, str], *, timeout: float) -> Sequence[Owned]:
        from e2b import AsyncSandbox, SandboxQuery

        found: list[Owned] = []
        with _translated("listing the sandboxes"):
            pages = AsyncSandbox.list(
                query=SandboxQuery(metadata=dict(labels)), request_timeout=timeout, **self._connection
            )
            while pages.has_next:
                found += [Owned(each.sandbox_id, each.metadata or {}) for each in await pages.next_items()]
        return found

    async def close(self) -> None:
        """The SDK keeps its connections for the process."""
