"""The tables of the run database, and how its file is made and opened.

Role: everything about SQLite that is not a rule of the ledger. Neighbours: `sqlite` is the only caller.
Invariants: a store becomes visible whole or not at all (it is built beside and linked into place); a file
of another schema version is refused.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

from rollwright.database import Reading, reading
from rollwright.errors import SchemaError

VERSION = 1
"""Of the tables below; what is in the blobs carries its own (`wire`)."""
PAGE_BYTES = 8192
"""A transaction writes some nine pages for its few small rows, and the payload: small pages write less (210
KB for a group of eight short rollouts, 531 KB with pages of 32 KiB, at the same CPU time)."""
CHECKPOINT_PAGES = 512
"""Size of the write-ahead log at which SQLite moves it into the file: 4 MiB."""

TABLES = """
CREATE TABLE meta (version INTEGER NOT NULL, run TEXT NOT NULL, policy TEXT NOT NULL);
CREATE TABLE started (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout TEXT NOT NULL UNIQUE CHECK (rollout <> ''),
    identity BLOB NOT NULL,
    wall REAL NOT NULL
);
CREATE TABLE disposition (
    rollout TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    version TEXT NOT NULL DEFAULT '',
    uses INTEGER NOT NULL DEFAULT 0,
    position INTEGER NOT NULL DEFAULT 0,
    wall REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX queued ON disposition (position) WHERE state = 'queued';
CREATE TABLE groups (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    attempt INTEGER NOT NULL,
    wall REAL NOT NULL
);
CREATE TABLE payloads (position INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE commits (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    position INTEGER NOT NULL,
    version TEXT NOT NULL,
    checkpoint TEXT NOT NULL,
    record BLOB NOT NULL,
    wall REAL NOT NULL
);
CREATE TABLE late (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    wall REAL NOT NULL
);
CREATE TABLE forks (incarnation INTEGER PRIMARY KEY, step INTEGER NOT NULL, wall REAL NOT NULL);
INSERT INTO forks VALUES (0, 0, 0);
"""


def connect(path: Path, *, run: str, policy: str, busy: float) -> sqlite3.Connection:
    """A connection to the store at `path`, made first where there is none.

    Raises:
        SchemaError: it is of another version, or holds no store.
        sqlite3.Error, OSError: see `explained`.
    """
    if not path.exists():
        _create(path, run, policy)
    db = sqlite3.connect(path, timeout=busy, isolation_level=None, check_same_thread=False)
    try:
        _known(db, path)
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    except BaseException:  # boundary: the connection has no other owner yet
        db.close()
        raise
    return db


def connect_reading(path: Path) -> Reading:
    """The store at `path`, which must be there, for reading.

    Raises:
        as `connect`.
    """
    opened = reading(path)
    try:
        _known(opened.db, path)
    except BaseException:  # boundary: the connection has no other owner yet
        opened.close()
        raise
    return opened


def _known(db: sqlite3.Connection, path: Path) -> None:
    tables = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]
    version = db.execute("SELECT version FROM meta").fetchone()[0] if tables else None
    if version != VERSION:
        what = f"is a store of schema {version}" if tables else "holds no store"
        raise SchemaError(
            f"{path} {what}; this rollwright reads schema {VERSION}: use the version that wrote it, "
            "or start a new run"
        )


def _create(path: Path, run: str, policy: str) -> None:
    """Build a new store beside `path` and link it there; whoever comes first wins."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    draft.unlink(missing_ok=True)
    db = sqlite3.connect(draft, isolation_level=None)
    try:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(TABLES)
        db.execute("INSERT INTO meta VALUES (?, ?, ?)", (VERSION, run, policy))
    finally:
        db.close()
    try:
        os.link(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        pass  # another process was first; its store is as good
    finally:
        draft.unlink(missing_ok=True)
