"""A snapshot of a remote sandbox: its files as one archive, on the host.

Role: what `snapshot`, `restore`, `fork` and `load` hand around. Neighbours: `archive` keeps it on disk.
Invariant: immutable; the same files are the same bytes. It is not the vendor's own snapshot: it works
with any vendor, goes from one to another, and costs the transfer of the files.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.sandbox import archive


class RemoteSnapshot:
    """See `Snapshot`. Held in memory until it is dropped."""

    def __init__(self, content: bytes) -> None:
        self.id = f"sha256-{archive.digest(content)}"
        self._content: bytes | None = content

    @property
    def content(self) -> bytes:
        """The archive. Raises `SandboxError` where it was dropped."""
        if self._content is None:
            raise SandboxError(f"snapshot {self.id} was dropped")
        return self._content

    async def save(self, folder: Path) -> Path:
        return await asyncio.to_thread(archive.save, self.content, folder)

    async def drop(self) -> None:
        self._content = None
