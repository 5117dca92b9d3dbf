"""A sandbox's files for as long as it lives.

Role: what `Sandbox.files` gives. Neighbours: `instance` makes it over the files of a place. Invariant:
nothing is touched of a sandbox that is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from rollwright.sandbox.base import Files


class GuardedFiles:
    """See `sandbox.base.Files`. `check` raises `SandboxLost` where the sandbox is gone."""

    def __init__(self, files: Files, check: Callable[[], None]) -> None:
        self._files, self._check = files, check

    async def read(self, path: str) -> bytes:
        self._check()
        return await self._files.read(path)

    async def write(self, path: str, data: bytes) -> None:
        self._check()
        await self._files.write(path, data)

    async def list(self, path: str = "") -> list[str]:
        self._check()
        return await self._files.list(path)

    async def remove(self, path: str) -> None:
        self._check()
        await self._files.remove(path)

    async def upload(self, archive: bytes, path: str = "") -> None:
        self._check()
        await self._files.upload(archive, path)

    async def download(self, path: str = "") -> bytes:
        self._check()
        return await self._files.download(path)
