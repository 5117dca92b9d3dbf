"""An archive for tests that ask for none of what is kept.

Role: fills the seam `archive.base.Archive` where rollouts are made and nobody looks back. Neighbours: the
factory's tests. Invariant: it takes everything and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollwright.types import PolicyVersion, Sample, Scored, Task


class NoArchive:
    """Keeps nothing."""

    def add(self, task: Task, scored: Scored) -> None:
        return

    def flush(self) -> None:
        return

    def trained(self, version: PolicyVersion, samples: Sequence[Sample]) -> None:
        return

    def close(self) -> None:
        return
