"""Files of a remote sandbox.

Role: implements `Files`. Neighbours: `instance` carries the requests; the helper inside opens the paths,
step by step and through no link, as the local backends do. Invariant: what is refused there is the same
exception here.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import Protocol

from rollwright.sandbox.remote.line import Reply, failed
from rollwright.types import CallStatus, Json


class Carrier(Protocol):
    """What `instance` offers."""

    async def trusted(self, operation: str, data: bytes | None = None, **arguments: Json) -> Reply:
        """A request that runs no agent code."""


class RemoteFiles:
    """See `Files`."""

    def __init__(self, sandbox: Carrier) -> None:
        self._sandbox = sandbox

    async def read(self, path: str) -> bytes:
        return (await self._done(self._sandbox.trusted("read", path=path), path)).data or b""

    async def write(self, path: str, data: bytes) -> None:
        await self._done(self._sandbox.trusted("write", data, path=path), path)

    async def list(self, path: str = "") -> list[str]:
        names = (await self._done(self._sandbox.trusted("list", path=path), path)).data
        return os.fsdecode(names).split("\0") if names else []

    async def remove(self, path: str) -> None:
        await self._done(self._sandbox.trusted("remove", path=path), path)

    async def upload(self, archive: bytes, path: str = "") -> None:
        await self._done(self._sandbox.trusted("upload", archive, path=path), path)

    async def download(self, path: str = "") -> bytes:
        return (await self._done(self._sandbox.trusted("download", path=path), path)).data or b""

    @staticmethod
    async def _done(request: Awaitable[Reply], path: str) -> Reply:
        reply = await request
        if reply.status is not CallStatus.OK:
            raise failed(reply, path)
        return reply
