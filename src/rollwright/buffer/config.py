"""Configuration of queue and ledger.

Role: which store, how large. Neighbours: the conductor builds it once for each process. Invariant: two
processes never share a store in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollwright.buffer.base import Store
from rollwright.clock import Clock
from rollwright.plugins import PartConfig


class QueueConfig(PartConfig):
    """Queue and ledger: in memory, or in one SQLite file."""

    type: Literal["memory", "sqlite"] = "sqlite"
    """`sqlite` survives kill −9 and is shared by processes; `memory` ends with its process."""
    capacity: int = Field(64, ge=1)
    """Groups that may wait for the trainer; a full queue makes the rollout side wait (back-pressure)."""

    def build(self, path: Path, clock: Clock, *, run: str) -> Store:
        """The store of `run`; `path` is the database file.

        Raises:
            SchemaError, StoreError: the file cannot be used.
        """
        if self.type == "sqlite":
            from rollwright.buffer.sqlite import SqliteStore

            return SqliteStore(path, self.capacity, clock, run=run)
        from rollwright.buffer.memory import MemoryStore

        return MemoryStore(self.capacity, run=run)
