"""The archive in one SQLite file of the run folder, `rollouts.db`.

Role: the one implementation. Neighbours: the rollout process adds rollouts, the trainer process adds
samples, `report` and `trace` read while both go on. Invariants: every record carries the wire schema; a file
of another version is refused; looking something up by any of its ids uses an index, so it costs the same in a
run of 50,000 rollouts as in one of 50. What is written survives the process (WAL), and a power cut up to the
last moments: the ledger beside it is what must never lose anything.
"""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollwright.archive.base import Kept, Line, Trained
from rollwright.database import explained
from rollwright.errors import SchemaError, StoreError
from rollwright.types import PolicyVersion, Sample, Scored, Task
from rollwright.wire import decode, encode

VERSION = 1
"""Of the tables below; what is in the blobs carries its own (`wire`)."""
PENDING = 64
"""Rollouts that wait in memory before they are written."""
BUSY_SECONDS = 30.0
"""How long a write waits for another process's write."""
SELECTED = 200
"""Rollouts read by one SELECT."""
LEVEL = 1
"""Of zlib: 0.1 ms a rollout; tokens and turns shrink to about a quarter."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tasks (task TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    n INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL UNIQUE,
    grp TEXT NOT NULL,
    task TEXT NOT NULL,
    trace TEXT NOT NULL,
    job TEXT NOT NULL,
    outcome TEXT NOT NULL,
    value REAL,
    turns INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    seconds REAL NOT NULL,
    wall REAL NOT NULL,
    versions TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS bodies (rollout TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS made (
    version TEXT NOT NULL, rollout TEXT NOT NULL, PRIMARY KEY (version, rollout)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    rollout TEXT NOT NULL,
    row INTEGER NOT NULL,
    version TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (rollout, row)
);
CREATE INDEX IF NOT EXISTS rollouts_grp ON rollouts (grp);
CREATE INDEX IF NOT EXISTS rollouts_task ON rollouts (task);
CREATE INDEX IF NOT EXISTS rollouts_trace ON rollouts (trace);
CREATE INDEX IF NOT EXISTS samples_version ON samples (version);
"""

_LINE = "rollout, grp, task, trace, job, outcome, value, turns, sampled, seconds, wall, versions"


class SqliteArchive:
    """The archive at `path`, made if there is none. One object for each process.

    Raises:
        SchemaError: the file is of another schema version.
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._pending: list[tuple[Task, Scored]] = []
        self._tasks: set[str] = set()
        with explained(path):
            self._db = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._open()

    def _open(self) -> None:
        if self._db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            for statement in TABLES.split(";"):
                self._db.execute(statement)
            found = self._db.execute("SELECT version FROM meta").fetchone()
            if found is None:
                self._db.execute("INSERT INTO meta VALUES (?)", (VERSION,))
        if found is not None and found[0] != VERSION:
            self._db.close()
            raise SchemaError(
                f"{self._path} is an archive of schema {found[0]}; this rollwright reads schema {VERSION}: "
                "use the version that wrote it"
            )

    def add(self, task: Task, scored: Scored) -> None:
        with self._lock:
            self._pending.append((task, scored))
            if len(self._pending) >= PENDING:
                self.flush()

    def flush(self) -> None:
        with self._lock, explained(self._path):
            if not self._pending:
                return
            pending, self._pending = self._pending, []
            new = {task.id: task for task, _ in pending if task.id not in self._tasks}
            bodies = [(s.rollout.identity.rollout, _packed(encode(s))) for _, s in pending]
            tasks = [(id, _packed(encode(task))) for id, task in new.items()]
            with self._transaction():
                self._db.executemany("INSERT OR REPLACE INTO tasks VALUES (?, ?)", tasks)
                self._db.executemany(
                    f"INSERT OR REPLACE INTO rollouts ({_LINE}) VALUES ({','.join('?' * 12)})",
                    [_line(scored) for _, scored in pending],
                )
                self._db.executemany("INSERT OR REPLACE INTO bodies VALUES (?, ?)", bodies)
                self._db.executemany(
                    "INSERT OR REPLACE INTO made VALUES (?, ?)",
                    [(str(v), s.rollout.identity.rollout) for _, s in pending for v in s.rollout.versions],
                )
            self._tasks.update(new)

    def trained(self, version: PolicyVersion, samples: Sequence[Sample]) -> None:
        rows: dict[str, int] = {}
        written = []
        for sample in samples:
            row = rows[sample.rollout] = rows.get(sample.rollout, -1) + 1
            kept = Trained(
                rollout=sample.rollout,
                group=sample.group,
                row=row,
                version=str(version),
                advantages=sample.advantages,
                weights=sample.weights,
            )
            written.append((sample.rollout, row, str(version), _packed(encode(kept))))
        with self._lock, explained(self._path), self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", written)

    def close(self) -> None:
        with self._lock:
            try:
                self.flush()
            finally:
                self._db.close()

    def lines(self) -> Iterator[Line]:
        """Every rollout in the order in which they were kept."""
        last = 0
        while True:  # in pages, so that nobody waits for a reader
            found = self._rows(f"SELECT n, {_LINE} FROM rollouts WHERE n > ? ORDER BY n LIMIT 5000", last)
            if not found:
                return
            for n, *rest in found:
                last = int(n)
                yield _read(rest)

    def line(self, rollout: str) -> Line | None:
        """One rollout in short."""
        return next(iter(self._where("rollout = ?", rollout)), None)

    def of_group(self, group: str) -> list[Line]:
        """The rollouts of a group, voided attempts included."""
        return self._where("grp = ?", group)

    def of_task(self, task: str) -> list[Line]:
        """The rollouts of a task."""
        return self._where("task = ?", task)

    def of_trace(self, trace: str) -> list[Line]:
        """The rollouts of a trace id."""
        return self._where("trace = ?", trace)

    def lines_of(self, version: str) -> list[Line]:
        """The rollouts of which `version` sampled a token."""
        return self._where("rollout IN (SELECT rollout FROM made WHERE version = ?)", version)

    def kept(self, rollout: str) -> Kept | None:
        """One rollout whole."""
        found = self._rows(
            "SELECT b.data, t.data FROM bodies b JOIN rollouts r USING (rollout) "
            "JOIN tasks t ON t.task = r.task WHERE b.rollout = ?",
            rollout,
        )
        if not found:
            return None
        body, task = found[0]
        return Kept(task=decode(Task, zlib.decompress(task)), scored=decode(Scored, zlib.decompress(body)))

    def sizes(self) -> dict[str, int]:
        """Stored bytes of each rollout's body."""
        return {rollout: int(n) for rollout, n in self._rows("SELECT rollout, length(data) FROM bodies")}

    def whole(self, rollouts: Sequence[str]) -> Iterator[tuple[Kept, list[Trained]]]:
        """Rollouts whole with what the trainer took of them, in the order given; unknown ids are left
        out."""
        for first in range(0, len(rollouts), SELECTED):
            part = rollouts[first : first + SELECTED]
            marks = ",".join("?" * len(part))
            bodies = dict(self._rows(f"SELECT rollout, data FROM bodies WHERE rollout IN ({marks})", *part))
            samples: dict[str, list[Trained]] = {}
            query = f"SELECT rollout, data FROM samples WHERE rollout IN ({marks}) ORDER BY rollout, row"
            for rollout, data in self._rows(query, *part):
                samples.setdefault(rollout, []).append(decode(Trained, zlib.decompress(data)))
            query = (
                "SELECT t.task, t.data FROM tasks t WHERE t.task IN "
                f"(SELECT r.task FROM rollouts r WHERE r.rollout IN ({marks}))"
            )
            tasks = {task: decode(Task, zlib.decompress(data)) for task, data in self._rows(query, *part)}
            for rollout in part:
                if rollout not in bodies:
                    continue
                scored = decode(Scored, zlib.decompress(bodies[rollout]))
                if task := tasks.get(scored.rollout.identity.task):
                    yield Kept(task=task, scored=scored), samples.get(rollout, [])

    def samples(self, rollout: str) -> list[Trained]:
        """What the trainer took of a rollout, a record for each row."""
        query = "SELECT data FROM samples WHERE rollout = ? ORDER BY row"
        return [decode(Trained, zlib.decompress(data)) for (data,) in self._rows(query, rollout)]

    def trained_into(self, version: str) -> list[tuple[str, int]]:
        """(rollout, row) of every sample of the step that made `version`."""
        query = "SELECT rollout, row FROM samples WHERE version = ? ORDER BY rollout, row"
        return [(rollout, row) for rollout, row in self._rows(query, version)]

    def _where(self, condition: str, value: str) -> list[Line]:
        found = self._rows(f"SELECT {_LINE} FROM rollouts WHERE {condition} ORDER BY n", value)
        return [_read(row) for row in found]

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, explained(self._path):
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def opened(path: Path) -> SqliteArchive:
    """The archive of a run that exists.

    Raises:
        StoreError: there is none.
    """
    if not path.is_file():
        raise StoreError(f"{path}: no archive of rollouts: the run has not started, or it was removed")
    return SqliteArchive(path)


def _packed(data: bytes) -> bytes:
    return zlib.compress(data, LEVEL)


def _line(scored: Scored) -> tuple[object, ...]:
    rollout, identity = scored.rollout, scored.rollout.identity
    sampled = sum(int(row.sampled.sum()) for row in rollout.rows)
    return (
        identity.rollout,
        identity.group,
        identity.task,
        identity.trace,
        identity.job,
        rollout.outcome.value,
        scored.score.value,
        len(rollout.turns),
        sampled,
        rollout.seconds,
        rollout.started,
        " ".join(str(version) for version in rollout.versions),
    )


def _read(row: Sequence[Any]) -> Line:
    *fields, versions = row
    names = ("rollout", "group", "task", "trace", "job", "outcome", "value", "turns", "sampled", "seconds")
    return Line(**dict(zip((*names, "wall"), fields, strict=True)), versions=tuple(str(versions).split()))
