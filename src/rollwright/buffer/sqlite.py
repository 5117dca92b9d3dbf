"""Queue, ledger and commits in one SQLite file that several processes use at once.

Role: the durable store. Neighbours: the rollout process starts, puts and drops, the trainer reads and
commits, a viewer counts; `rules` says what may change, `schema` opens the file. Invariants: every change is
one transaction (`BEGIN IMMEDIATE`, WAL), so after kill −9 it happened or it did not; a put, a commit and a
fork are synced (`synchronous=FULL`), and with them all that went before; positions come from AUTOINCREMENT
and are never used again; `started` is append-only and independent of the dispositions; payloads of consumed
groups are deleted with their commit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollwright.buffer import rules, schema
from rollwright.buffer.base import Commit, Counts, Drop, Entry, Queued
from rollwright.clock import Clock
from rollwright.database import explained
from rollwright.errors import StoreError
from rollwright.types import Disposition, Group, Identity, Lineage
from rollwright.wire import decode, encode

BUSY_SECONDS = 30.0
"""How long a transaction waits for another process's transaction."""
CHUNK = 500
"""Rollouts asked for in one SELECT; SQLite's own limit is 32,766 parameters."""

_ENTRY = (
    "SELECT s.identity, d.state, d.reason, d.version, d.uses FROM started s "
    "JOIN disposition d USING (rollout)"
)


class SqliteStore:
    """The store at `path`, made if there is none; at most `capacity` groups behind the consumed position.

    One object for each process (never carried through a fork); calls from several threads take turns. `run`
    and `policy` name the lineage: None takes what the file says ("run", "policy" for a new one). With
    `readonly` the store must be there, nothing beside it is written, and whatever would change it is refused.

    Raises:
        SchemaError: the file is of another schema version, or no store.
        StoreError: it belongs to another run, or cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        capacity: int,
        clock: Clock,
        *,
        run: str | None = None,
        policy: str | None = None,
        busy_seconds: float = BUSY_SECONDS,
        readonly: bool = False,
    ) -> None:
        self._path = path
        self._capacity = capacity
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._synced: bool | None = None
        with explained(path):
            if readonly:
                opened = schema.connect_reading(path)
                self._db, self._release = opened.db, opened.close
            else:
                self._db = schema.connect(
                    path, run=run or "run", policy=policy or "policy", busy=busy_seconds
                )
                self._release = self._db.close
        self._run, self._policy = self._db.execute("SELECT run, policy FROM meta").fetchone()
        if (run or self._run, policy or self._policy) != (self._run, self._policy):
            self.close()
            raise StoreError(
                f"{path} belongs to run {self._run}/{self._policy}, not to {run or self._run}/"
                f"{policy or self._policy}: "
                "give another run folder, or resume the run it belongs to"
            )

    def start(self, identities: Sequence[Identity]) -> None:
        names = [identity.rollout for identity in identities]
        wall = self._clock.wall()
        with self._transaction(synced=False):
            rules.startable(names, self._lines(names))
            self._db.executemany(
                "INSERT INTO started (rollout, identity, wall) VALUES (?, ?, ?)",
                [(identity.rollout, encode(identity), wall) for identity in identities],
            )
            self._db.executemany(
                "INSERT INTO disposition (rollout, state, wall) VALUES (?, ?, ?)",
                [(name, Disposition.RUNNING.value, wall) for name in names],
            )

    def put(self, group: Group) -> bool:
        data = encode(group)  # before the transaction: other processes wait for it
        rollouts = [member.rollout.identity.rollout for member in group.members]
        wall = self._clock.wall()
        with self._transaction():
            taken = (
                self._db.execute("SELECT 1 FROM groups WHERE name = ?", (group.id,)).fetchone() is not None
            )
            drops = rules.unwelcome(group, self._lines(rollouts), taken)
            if drops is not None:
                self._end(drops)
                self._log(drops)
                return True
            if self._depth() >= self._capacity:
                return False
            position = self._db.execute(
                "INSERT INTO groups (name, attempt, wall) VALUES (?, ?, ?)", (group.id, group.attempt, wall)
            ).lastrowid
            self._db.execute("INSERT INTO payloads (position, data) VALUES (?, ?)", (position, data))
            self._db.executemany(
                "UPDATE disposition SET state = ?, position = ?, wall = ? WHERE rollout = ?",
                [(Disposition.QUEUED.value, position, wall, rollout) for rollout in rollouts],
            )
        return True

    def read(self, after: int, limit: int) -> list[Queued]:
        query = "SELECT position, data FROM payloads WHERE position > ? ORDER BY position LIMIT ?"
        with self._reading():
            found = self._db.execute(query, (after, limit)).fetchall()
        return [Queued(position=position, group=decode(Group, data)) for position, data in found]

    def depth(self) -> int:
        with self._reading():
            return self._depth()

    def commit(self, commit: Commit) -> None:
        named = [*commit.trained, *(drop.rollout for drop in commit.dropped)]
        wall = self._clock.wall()
        with self._transaction():
            kept = rules.admit(
                commit,
                self._last(),
                self._lines(named),
                queued=self._queued(commit.position),
                newest=self._newest(),
                incarnation=len(self._forks()) - 1,
            )
            version = str(kept.version)
            self._db.executemany(
                "UPDATE disposition SET state = ?, version = ?, uses = 1, wall = ? WHERE rollout = ?",
                [(Disposition.TRAINED.value, version, wall, rollout) for rollout in kept.trained],
            )
            self._end(kept.dropped)
            self._db.execute("DELETE FROM payloads WHERE position <= ?", (kept.position,))
            self._db.execute(
                "INSERT INTO commits (position, version, checkpoint, record, wall) VALUES (?, ?, ?, ?, ?)",
                (kept.position, version, kept.checkpoint, encode(kept), wall),
            )

    def commits(self) -> list[Commit]:
        with self._reading():
            found = self._db.execute("SELECT record FROM commits ORDER BY n").fetchall()
        return [decode(Commit, record) for (record,) in found]

    def last_commit(self) -> Commit | None:
        with self._reading():
            return self._last()

    def drop(self, drops: Sequence[Drop]) -> None:
        with self._transaction(synced=False):
            ending, late = rules.sift(drops, self._lines([drop.rollout for drop in drops]))
            self._end(ending)
            self._log(late)

    def counts(self) -> Counts:
        # One statement is one snapshot, so the two sides are of the same moment.
        query = (
            "SELECT NULL, count(*) FROM started UNION ALL "
            "SELECT state, count(*) FROM disposition GROUP BY state"
        )
        with self._reading():
            (_, started), *by = self._db.execute(query).fetchall()
        return Counts(started=started, by=dict(by))

    def find(self, rollout: str) -> Entry | None:
        with self._reading():
            found = self._db.execute(f"{_ENTRY} WHERE rollout = ?", (rollout,)).fetchone()
        return _entry(found) if found else None

    def entries(self) -> list[Entry]:
        with self._reading():
            found = self._db.execute(f"{_ENTRY} ORDER BY s.n").fetchall()
        return [_entry(row) for row in found]

    def newest(self, limit: int) -> list[Identity]:
        with self._reading():
            found = self._db.execute(
                "SELECT identity FROM started ORDER BY n DESC LIMIT ?", (limit,)
            ).fetchall()
        return [decode(Identity, identity) for (identity,) in found]

    def reopen(self) -> int:
        change = "UPDATE disposition SET state = ?, reason = ?, wall = ? WHERE state = ?"
        void, running = Disposition.VOID.value, Disposition.RUNNING.value
        with self._transaction():
            reason = "its process is gone"
            return self._db.execute(change, (void, reason, self._clock.wall(), running)).rowcount

    def late(self) -> tuple[Drop, ...]:
        with self._reading():
            found = self._db.execute("SELECT rollout, state, reason FROM late ORDER BY n").fetchall()
        return tuple(
            Drop(rollout=rollout, disposition=Disposition(state), reason=reason)
            for rollout, state, reason in found
        )

    def lineage(self) -> Lineage:
        with self._reading():
            return self._lineage()

    def fork(self, step: int) -> Lineage:
        with self._transaction():
            lineage = rules.forked(self._lineage(), step, self._last())
            self._db.execute(
                "INSERT INTO forks (incarnation, step, wall) VALUES (?, ?, ?)",
                (len(lineage.forks) - 1, step, self._clock.wall()),
            )
        return lineage

    def close(self) -> None:
        with self._lock:
            self._release()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, explained(self._path):
            if os.getpid() != self._pid:
                raise StoreError(f"{self._path} was opened before a fork; open it in this process")
            yield

    @contextmanager
    def _transaction(self, *, synced: bool = True) -> Iterator[None]:
        """All of it or nothing. Left, it survives kill −9 in any case, and a power cut where it is `synced`.

        What is not synced becomes so with the next transaction that is, since the log is one file: what a
        put or a commit rests on is never lost before it. A start or a drop that a power cut takes along is
        one that nothing rests on, and `reopen` voids what it leaves running.
        """
        with self._reading():
            if synced != self._synced:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
                self._synced = synced
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                # After a full disk SQLite may have rolled back by itself, or COMMIT may have left it open.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _lines(self, rollouts: Sequence[str]) -> dict[str, Disposition]:
        lines: dict[str, Disposition] = {}
        for first in range(0, len(rollouts), CHUNK):
            part = rollouts[first : first + CHUNK]
            marks = ",".join("?" * len(part))
            query = f"SELECT rollout, state FROM disposition WHERE rollout IN ({marks})"
            lines.update((rollout, Disposition(state)) for rollout, state in self._db.execute(query, part))
        return lines

    def _queued(self, position: int) -> list[str]:
        # The literal state lets SQLite use the partial index `queued`.
        query = "SELECT rollout FROM disposition WHERE state = 'queued' AND position <= ?"
        return [rollout for (rollout,) in self._db.execute(query, (position,))]

    def _newest(self) -> int:
        return int(self._db.execute("SELECT coalesce(max(position), 0) FROM groups").fetchone()[0])

    def _depth(self) -> int:
        query = (
            "SELECT count(*) FROM groups WHERE position > "
            "coalesce((SELECT position FROM commits ORDER BY n DESC LIMIT 1), 0)"
        )
        return int(self._db.execute(query).fetchone()[0])

    def _last(self) -> Commit | None:
        found = self._db.execute("SELECT record FROM commits ORDER BY n DESC LIMIT 1").fetchone()
        return decode(Commit, found[0]) if found else None

    def _forks(self) -> tuple[int, ...]:
        return tuple(step for (step,) in self._db.execute("SELECT step FROM forks ORDER BY incarnation"))

    def _lineage(self) -> Lineage:
        return Lineage(run=self._run, policy=self._policy, forks=self._forks())

    def _end(self, drops: Sequence[Drop]) -> None:
        wall = self._clock.wall()
        self._db.executemany(
            "UPDATE disposition SET state = ?, reason = ?, wall = ? WHERE rollout = ?",
            [(drop.disposition.value, drop.reason, wall, drop.rollout) for drop in drops],
        )

    def _log(self, drops: Sequence[Drop]) -> None:
        wall = self._clock.wall()
        self._db.executemany(
            "INSERT INTO late (rollout, state, reason, wall) VALUES (?, ?, ?, ?)",
            [(drop.rollout, drop.disposition.value, drop.reason, wall) for drop in drops],
        )


def _entry(row: tuple[bytes, str, str, str, int]) -> Entry:
    identity, state, reason, version, uses = row
    return Entry(
        identity=decode(Identity, identity),
        disposition=Disposition(state),
        reason=reason,
        version=version,
        uses=uses,
    )
