"""The archive seam: every rollout that ended, whole, and what the trainer made of it.

Role: what `report` and `trace` read. Neighbours: the factory adds rollouts, the trainer's side adds samples;
the ledger, not the archive, says where a rollout stands. Invariants: a rollout is in the archive before its
group is in the queue; its samples are in before they are committed, so that what the ledger calls trained is
never without them; a repeat of a rollout id replaces what was there; a rollout keeps the task that it was
given, whatever others of the same task id were given. No text of a rollout ends a run: what cannot be stored
is left out, and that is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from rollwright.types import Floats, PolicyVersion, Sample, Scored, Task
from rollwright.types.record import ArrayRecord


class Line(Struct, frozen=True, kw_only=True):
    """One rollout in short, for lists. `versions` are those that sampled it, as text (`policy@0.3`)."""

    rollout: str
    group: str
    task: str
    trace: str
    job: str
    """`train` or `eval`."""
    outcome: str
    value: float | None
    turns: int
    sampled: int
    seconds: float
    wall: float
    """Seconds since the epoch at which it started."""
    versions: tuple[str, ...]
    digest: str = ""
    """Of the task's content: equal ones were given the same task."""


class Kept(Struct, frozen=True, kw_only=True):
    """One rollout whole, with its task."""

    task: Task
    scored: Scored


class Trained(ArrayRecord, frozen=True, kw_only=True):
    """Row `row` of a rollout as the step that made `version` took it: float32[T] advantages and weights."""

    rollout: str
    group: str
    row: int
    version: str
    advantages: Floats
    weights: Floats


class Archive(Protocol):
    """Keeps what a person may ask for later. Raises `StoreError` where it cannot."""

    def add(self, task: Task, scored: Scored) -> None:
        """Keep one rollout that ended; it may wait in memory until `flush`. Nothing in it is an error."""

    def flush(self) -> None:
        """Have everything added so far survive this process."""

    def trained(self, version: PolicyVersion, samples: Sequence[Sample]) -> None:
        """Keep what the step that makes `version` is about to train; survives this process on return."""

    def close(self) -> None:
        """Flush and release it; idempotent."""
