"""The tables of the archive, how its file is opened, and how an older one is brought up to date.

Role: everything about SQLite that is not a record. Neighbours: `sqlite` opens for writing, `reader` for
reading. Invariants: a file of a newer version is refused; an older one is migrated in one transaction when it
is opened for writing, and read as it is otherwise; a reader changes nothing.
"""

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollwright.database import Reading, reading
from rollwright.errors import SchemaError

VERSION = 2
"""Of the tables below; what is in the blobs carries its own (`wire`).

1 kept one task for each task id, so that an evaluation of other tasks of the same names replaced them."""
BUSY_SECONDS = 30.0
"""How long a write waits for another process's write."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tasks (digest TEXT PRIMARY KEY, task TEXT NOT NULL, data BLOB NOT NULL);
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
    versions TEXT NOT NULL,
    digest TEXT NOT NULL DEFAULT ''
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

_FROM_1 = """
ALTER TABLE tasks RENAME TO tasks_1;
CREATE TABLE tasks (digest TEXT PRIMARY KEY, task TEXT NOT NULL, data BLOB NOT NULL);
INSERT INTO tasks SELECT digest(data), task, data FROM tasks_1;
ALTER TABLE rollouts ADD COLUMN digest TEXT NOT NULL DEFAULT '';
UPDATE rollouts SET digest = coalesce((SELECT digest FROM tasks WHERE tasks.task = rollouts.task), '');
DROP TABLE tasks_1;
"""
_AS_2 = (
    "CREATE TEMP VIEW tasks AS SELECT task AS digest, task, data FROM main.tasks",
    "CREATE TEMP VIEW rollouts AS SELECT *, task AS digest FROM main.rollouts",
)
"""Version 1 as a reader sees it: a task id had one content, so that it may stand for the digest."""


def digest_of(data: bytes) -> str:
    """The digest of a task as it is encoded."""
    return hashlib.sha256(data).hexdigest()


def connect(path: Path) -> sqlite3.Connection:
    """The archive at `path` for writing: made where there is none, migrated where it is older.

    Raises:
        SchemaError: it is of a newer schema version.
        sqlite3.Error: see `explained`.
    """
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        with transaction(db):
            _bring_up(db, path)
    except BaseException:  # boundary: the connection has no other owner yet
        db.close()
        raise
    return db


def _bring_up(db: sqlite3.Connection, path: Path) -> None:
    there = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
    found = db.execute("SELECT version FROM meta").fetchone() if there else None
    if found is not None:
        _known(found[0], path)
    if found is not None and found[0] == 1:
        db.create_function("digest", 1, _digest_of_packed, deterministic=True)
        for statement in _FROM_1.split(";"):
            db.execute(statement)
        db.execute("UPDATE meta SET version = ?", (VERSION,))
    for statement in TABLES.split(";"):
        db.execute(statement)
    if found is None:
        db.execute("INSERT INTO meta VALUES (?)", (VERSION,))


def _digest_of_packed(data: bytes) -> str:
    try:
        return digest_of(zlib.decompress(data))
    except zlib.error:  # damaged: it stays, and the reader says so
        return digest_of(data)


def connect_reading(path: Path) -> Reading:
    """The archive at `path`, of any version that is known, for reading.

    Raises:
        SchemaError: it is of a newer schema version, or holds no archive.
        sqlite3.Error, OSError: see `explained`.
    """
    opened = reading(path)
    try:
        there = opened.db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
        found = opened.db.execute("SELECT version FROM meta").fetchone() if there else None
        if found is None:
            raise SchemaError(f"{path} holds no archive: the run was ended while it was made")
        _known(found[0], path)
        if found[0] == 1:
            for statement in _AS_2:
                opened.db.execute(statement)
    except BaseException:  # boundary: the connection has no other owner yet
        opened.close()
        raise
    return opened


def _known(version: int, path: Path) -> None:
    if version not in (1, VERSION):
        raise SchemaError(
            f"{path} is an archive of schema {version}; this rollwright reads schema {VERSION}: "
            "use the version that wrote it"
        )


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
