"""What SQLite says when it fails, as one line of our own.

Role: shared by every store that is a SQLite file. Neighbours: `buffer`, `archive`. Invariant: a failure
becomes one `StoreError` that says what happened, what holds and what to do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollwright.errors import StoreError

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
        else:
            text = f"{path}: {error}"
        raise StoreError(text) from error
