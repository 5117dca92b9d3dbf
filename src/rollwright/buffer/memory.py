"""Queue and ledger in the memory of one process.

Role: the store of mode `coupled` and of tests. Neighbours: `rules` says what may change. Invariants: those of
`base`, except durability: it ends with the process. Calls from several threads take turns.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from rollwright.buffer import rules
from rollwright.buffer.base import Commit, Counts, Drop, Entry, Queued
from rollwright.types import Disposition, Group, Identity, Lineage


class MemoryStore:
    """At most `capacity` groups behind the consumed position; gone when the process ends."""

    def __init__(self, capacity: int, *, run: str = "run", policy: str = "policy") -> None:
        self._capacity = capacity
        self._lock = threading.RLock()
        self._started: list[Identity] = []
        self._entries: dict[str, Entry] = {}
        self._positions: dict[str, int] = {}
        self._queued: set[str] = set()
        self._taken: set[str] = set()
        self._waiting: list[Queued] = []
        self._newest = 0
        self._last: Commit | None = None
        self._commits: list[Commit] = []
        self._late: list[Drop] = []
        self._lineage = Lineage(run=run, policy=policy)

    def start(self, identities: Sequence[Identity]) -> None:
        with self._lock:
            names = [identity.rollout for identity in identities]
            rules.startable(names, self._lines(names))
            for identity in identities:
                self._started.append(identity)
                self._entries[identity.rollout] = Entry(
                    identity=identity, disposition=Disposition.RUNNING, reason="", version="", uses=0
                )

    def put(self, group: Group) -> bool:
        with self._lock:
            rollouts = [member.rollout.identity.rollout for member in group.members]
            drops = rules.unwelcome(group, self._lines(rollouts), group.id in self._taken)
            if drops is not None:
                self._end(drops)
                self._late += drops
                return True
            if len(self._waiting) >= self._capacity:
                return False
            self._newest += 1
            self._taken.add(group.id)
            self._waiting.append(Queued(position=self._newest, group=group))
            for rollout in rollouts:
                self._positions[rollout] = self._newest
                self._set(rollout, Disposition.QUEUED)
            return True

    def read(self, after: int, limit: int) -> list[Queued]:
        with self._lock:
            return [queued for queued in self._waiting if queued.position > after][:limit]

    def depth(self) -> int:
        with self._lock:
            return len(self._waiting)

    def drop(self, drops: Sequence[Drop]) -> None:
        with self._lock:
            ending, late = rules.sift(drops, self._lines([drop.rollout for drop in drops]))
            self._end(ending)
            self._late += late

    def commit(self, commit: Commit) -> None:
        with self._lock:
            named = [*commit.trained, *(drop.rollout for drop in commit.dropped)]
            kept = rules.admit(
                commit,
                self._last,
                self._lines(named),
                queued=[r for r in self._queued if self._positions[r] <= commit.position],
                newest=self._newest,
                incarnation=len(self._lineage.forks) - 1,
            )
            for rollout in kept.trained:
                self._set(rollout, Disposition.TRAINED, version=str(kept.version), uses=1)
            self._end(kept.dropped)
            self._waiting = [queued for queued in self._waiting if queued.position > kept.position]
            self._last = kept
            self._commits.append(kept)

    def commits(self) -> list[Commit]:
        with self._lock:
            return list(self._commits)

    def last_commit(self) -> Commit | None:
        return self._last

    def counts(self) -> Counts:
        with self._lock:
            by = Counter(entry.disposition.value for entry in self._entries.values())
            return Counts(started=len(self._started), by=dict(by))

    def find(self, rollout: str) -> Entry | None:
        return self._entries.get(rollout)

    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def newest(self, limit: int) -> list[Identity]:
        with self._lock:
            return [entry.identity for entry in reversed(self._entries.values())][:limit]

    def reopen(self) -> int:
        with self._lock:
            running = [r for r, e in self._entries.items() if e.disposition is Disposition.RUNNING]
            reason = "its process is gone"
            self._end([Drop(rollout=r, disposition=Disposition.VOID, reason=reason) for r in running])
            return len(running)

    def late(self) -> tuple[Drop, ...]:
        with self._lock:
            return tuple(self._late)

    def lineage(self) -> Lineage:
        return self._lineage

    def fork(self, step: int) -> Lineage:
        with self._lock:
            self._lineage = rules.forked(self._lineage, step, self._last)
            return self._lineage

    def close(self) -> None:
        """Nothing to release: what it holds stays readable."""

    def _lines(self, rollouts: Sequence[str]) -> dict[str, Disposition]:
        return {r: self._entries[r].disposition for r in rollouts if r in self._entries}

    def _end(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            self._set(drop.rollout, drop.disposition, drop.reason)

    def _set(
        self, rollout: str, disposition: Disposition, reason: str = "", version: str = "", uses: int = 0
    ) -> None:
        self._queued.discard(rollout)
        if disposition is Disposition.QUEUED:
            self._queued.add(rollout)
        self._entries[rollout] = Entry(
            identity=self._entries[rollout].identity,
            disposition=disposition,
            reason=reason,
            version=version,
            uses=uses,
        )
