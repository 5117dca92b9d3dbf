"""SQLite files: opened without a trace by those who only read, and failures as one line of our own.

Role: shared by every store that is a SQLite file. Neighbours: `buffer`, `archive`. Invariants: a failure
becomes one `StoreError` that says what happened, what holds and what to do; who opens a file with `reading`
leaves nothing in its folder.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rollwright.errors import DamagedStore, StoreError

_FULL = (
    "SQLITE_FULL",
    "SQLITE_IOERR_WRITE",
    "SQLITE_IOERR_FSYNC",
    "SQLITE_IOERR_TRUNCATE",
    "SQLITE_IOERR_SHMSIZE",
)
_BUSY = (
    "SQLITE_BUSY",
    "SQLITE_BUSY_RECOVERY",
    "SQLITE_BUSY_SNAPSHOT",
    "SQLITE_BUSY_TIMEOUT",
    "SQLITE_LOCKED",
)
_NO_LOG = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_READONLY_CANTINIT", "SQLITE_READONLY_RECOVERY")
"""What SQLite says where it cannot make or mend the index of a write-ahead log."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """SQLite's errors as a `StoreError` of one line: what happened, what holds, what to do."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorname", "") or ""
        if code in _FULL:
            text = f"cannot write {path}: {error}; nothing was changed: free space on its disk, then resume"
        elif code in _BUSY:
            text = f"{path} is held by another process ({error}); nothing was changed: end that process"
        elif code in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            text = f"{path} is damaged ({error}): restore it from a copy, or start a new run"
            raise DamagedStore(text) from error
        else:
            text = f"{path}: {error}"
        raise StoreError(text) from error


@dataclass(frozen=True)
class Reading:
    """A connection that can only read, with the folder of its own that it may need."""

    db: sqlite3.Connection
    scratch: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Release both; idempotent."""
        self.db.close()
        if self.scratch is not None:
            self.scratch.cleanup()


def reading(path: Path) -> Reading:
    """The SQLite file at `path`, in WAL mode, for reading; its folder may be one that cannot be written.

    Without a log beside it nobody has it open, and it is read as it lies: SQLite would make a log and leave
    it there. With one both are read together, where SQLite cannot do that in this folder, in a copy.

    Raises:
        sqlite3.Error, OSError: see `explained`.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists():
        return Reading(_connected(path, "mode=ro&immutable=1"))
    try:
        return Reading(_connected(path, "mode=ro"))
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname not in _NO_LOG:
            raise
    scratch = tempfile.TemporaryDirectory(prefix="rollwright-reading-")
    try:
        copy = Path(scratch.name) / path.name
        shutil.copyfile(path, copy)
        shutil.copyfile(log, copy.with_name(log.name))
        return Reading(_connected(copy, "mode=ro"), scratch)
    except BaseException:  # boundary: the folder has no other owner yet
        scratch.cleanup()
        raise


def _connected(path: Path, how: str) -> sqlite3.Connection:
    name = f"file:{quote(str(path.absolute()))}?{how}"
    db = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:  # boundary: the connection has no other owner yet
        db.close()
        raise
    return db
