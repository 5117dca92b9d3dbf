"""The queue and ledger seams, which commit together.

Role: the durable spine between rollouts and trainer. Neighbours: the factory starts rollouts and puts
groups, the trainer reads and commits. Invariants: every started rollout has exactly one disposition at
every moment (started = Σ dispositions); `put` is idempotent by (group id, attempt); the consumed position,
the dispositions and the checkpoint's digest change in one transaction (`commit`), so that after kill −9
nothing is lost and nothing trained twice; depth never exceeds the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from rollwright.clock import Clock
from rollwright.errors import DeadlineExceeded
from rollwright.types import Disposition, Group, Identity, Lineage, PolicyVersion


class Queued(Struct, frozen=True, kw_only=True):
    """A group at its position (1, 2, …; never used again)."""

    position: int
    group: Group


class Drop(Struct, frozen=True, kw_only=True):
    """A rollout that ends without being trained, and why."""

    rollout: str
    disposition: Disposition
    reason: str = ""


class Commit(Struct, frozen=True, kw_only=True):
    """What becomes true together: everything up to `position` is consumed, these rollouts are trained at
    `version`, these dropped, and the state to resume from is the blob `checkpoint`."""

    version: PolicyVersion
    position: int
    trained: tuple[str, ...]
    dropped: tuple[Drop, ...]
    checkpoint: str
    """Digest of the checkpoint blob; "" keeps the previous one, which is only right where nothing was
    trained."""


class Counts(Struct, frozen=True, kw_only=True):
    """The ledger at one moment. `started` is counted on its own, not summed from `by`."""

    started: int
    by: dict[str, int]
    """`Disposition.value` → rollouts."""

    @property
    def balanced(self) -> bool:
        """Invariant 4."""
        return self.started == sum(self.by.values())


class Entry(Struct, frozen=True, kw_only=True):
    """A rollout's line in the ledger."""

    identity: Identity
    disposition: Disposition
    reason: str
    version: str
    """The version it was trained into, as text; "" otherwise."""
    uses: int


class Queue(Protocol):
    """Bounded, durable, in order."""

    def put(self, group: Group) -> bool:
        """Add a group and move its rollouts from running to queued, atomically.

        False: full, nothing changed. A repeated (id, attempt) is accepted and changes nothing. Another
        attempt of a group that is or was queued, and a group of which a rollout has already ended, is not
        queued (True): its rollouts still running end as `DUPLICATE` and `LATE`, and `Store.late` tells of
        them.

        Raises:
            StoreError: rollouts the ledger does not know, or no members.
        """

    def read(self, after: int, limit: int) -> list[Queued]:
        """Up to `limit` groups behind position `after`, oldest first; reading consumes nothing."""

    def depth(self) -> int:
        """Groups behind the consumed position."""

    def commit(self, commit: Commit) -> None:
        """All of `commit` or, with an error, nothing of it.

        Raises:
            StoreError: a rollout that already ended (it keeps its disposition); one trained that is not
                queued up to `position`; one queued up to there that the commit does not name; rollouts
                trained without a checkpoint; a position or version behind the last commit's; a replaced
                incarnation.
        """

    def commits(self) -> list[Commit]:
        """Every commit, oldest first."""

    def last_commit(self) -> Commit | None:
        """The newest commit: where to resume."""


class Ledger(Protocol):
    """One disposition for each rollout."""

    def start(self, identities: Sequence[Identity]) -> None:
        """Write down rollouts before they begin, as running. A known rollout id raises `StoreError`."""

    def drop(self, drops: Sequence[Drop]) -> None:
        """End open rollouts. One that ended already keeps its end (the late one is only logged)."""

    def counts(self) -> Counts:
        """The ledger now, from one consistent view."""

    def find(self, rollout: str) -> Entry | None:
        """One rollout's line."""

    def entries(self) -> list[Entry]:
        """Every rollout's line, in the order in which they were started."""

    def newest(self, limit: int) -> list[Identity]:
        """The last `limit` started rollouts, newest first."""

    def reopen(self) -> int:
        """After a crash: void everything that was running (its process is gone); returns how many."""


class Store(Queue, Ledger, Protocol):
    """Queue and ledger over one transaction domain, and the lineage whose newest incarnation may commit."""

    def late(self) -> tuple[Drop, ...]:
        """What came after a rollout had ended, in order: the drops and puts that changed nothing."""

    def lineage(self) -> Lineage:
        """The run's incarnations so far; the first one begins at step 0."""

    def fork(self, step: int) -> Lineage:
        """Open a new incarnation at `step` (a resume or a rollback) and return the lineage.

        From now on commits of older incarnations raise `StoreError`: a trainer that was given up for dead can
        change nothing any more.
        """

    def close(self) -> None:
        """Release it; idempotent."""


async def put_when_room(queue: Queue, group: Group, clock: Clock, timeout: float) -> float:
    """Back-pressure: put `group` as soon as there is room; returns the seconds waited.

    Raises:
        DeadlineExceeded: still full after `timeout` seconds.
    """
    began, pause = clock.now(), 0.01
    while not queue.put(group):
        waited = clock.now() - began
        if waited > timeout:
            raise DeadlineExceeded(f"waiting for room in the queue ({queue.depth()} groups)", timeout)
        await clock.sleep(pause)
        pause = min(pause * 1.5, 0.25)
    return clock.now() - began
