"""The archive as people's questions see it: looked up by any id, and changed by none of them.

Role: the reading half. Neighbours: `sqlite` writes, `view` asks. Invariants: looking something up by any of
its ids uses an index, so it costs the same in a run of 50,000 rollouts as in one of 50; reading works in a
folder that cannot be written; a record that cannot be read is passed over and named in `unreadable`.
"""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from rollwright.archive import schema
from rollwright.archive.base import Kept, Line, Trained
from rollwright.database import explained
from rollwright.errors import SchemaError, StoreError
from rollwright.types import Scored, Task
from rollwright.wire import decode

SELECTED = 200
"""Rollouts read by one SELECT."""

LINE = "rollout, grp, task, trace, job, outcome, value, turns, sampled, seconds, wall, versions, digest"
"""The columns of a `Line`, in its order."""

T = TypeVar("T")


class ArchiveReader:
    """Reads an archive through a connection that its maker opened; `close` releases it.

    Raises (every method):
        StoreError: the file is damaged or cannot be read.
    """

    def __init__(self, path: Path, db: sqlite3.Connection, close: Callable[[], None]) -> None:
        self._path, self._db, self._close = path, db, close
        self._lock = threading.RLock()
        self.unreadable: set[str] = set()
        """Rollouts of which a record was passed over, since it is damaged or of another schema."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release it; idempotent."""
        self._close()

    def lines(self) -> Iterator[Line]:
        """Every rollout in the order in which they were kept."""
        last = 0
        while True:  # in pages, so that nobody waits for a reader
            found = self._rows(f"SELECT n, {LINE} FROM rollouts WHERE n > ? ORDER BY n LIMIT 5000", last)
            if not found:
                return
            for n, *rest in found:
                last = int(n)
                yield _line(rest)

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
        """One rollout whole; None where there is none, or it cannot be read."""
        found = self._rows(
            "SELECT b.data, t.data FROM bodies b JOIN rollouts r USING (rollout) "
            "JOIN tasks t ON t.digest = r.digest WHERE b.rollout = ?",
            rollout,
        )
        if not found:
            return None
        body, task = self._decoded(Scored, found[0][0], rollout), self._decoded(Task, found[0][1], rollout)
        return Kept(task=task, scored=body) if task and body else None

    def sizes(self) -> dict[str, int]:
        """Stored bytes of each rollout's body."""
        return {rollout: int(n) for rollout, n in self._rows("SELECT rollout, length(data) FROM bodies")}

    def whole(self, rollouts: Sequence[str]) -> Iterator[tuple[Line, Kept, list[Trained]]]:
        """Rollouts whole with what the trainer took of them, in the order given; unknown ids are left
        out."""
        for first in range(0, len(rollouts), SELECTED):
            part = rollouts[first : first + SELECTED]
            marks = ",".join("?" * len(part))
            asked = f"rollout IN ({marks})"
            lines = {
                row[0]: _line(row) for row in self._rows(f"SELECT {LINE} FROM rollouts WHERE {asked}", *part)
            }
            bodies = dict(self._rows(f"SELECT rollout, data FROM bodies WHERE {asked}", *part))
            samples: dict[str, list[Trained]] = {}
            query = f"SELECT rollout, data FROM samples WHERE {asked} ORDER BY rollout, row"
            for rollout, data in self._rows(query, *part):
                if sample := self._decoded(Trained, data, rollout):
                    samples.setdefault(rollout, []).append(sample)
            digests = list({line.digest for line in lines.values()})
            query = f"SELECT digest, data FROM tasks WHERE digest IN ({','.join('?' * len(digests))})"
            packed = dict(self._rows(query, *digests))
            tasks: dict[str, Task | None] = {}
            for rollout in part:
                if rollout not in bodies or rollout not in lines:
                    continue
                digest = lines[rollout].digest
                if digest not in tasks:
                    tasks[digest] = self._decoded(Task, packed.get(digest, b""), rollout)
                scored, task = self._decoded(Scored, bodies[rollout], rollout), tasks[digest]
                if task is None:
                    self.unreadable.add(rollout)
                elif scored is not None:
                    yield lines[rollout], Kept(task=task, scored=scored), samples.get(rollout, [])

    def samples(self, rollout: str) -> list[Trained]:
        """What the trainer took of a rollout, a record for each row."""
        query = "SELECT data FROM samples WHERE rollout = ? ORDER BY row"
        found = [self._decoded(Trained, data, rollout) for (data,) in self._rows(query, rollout)]
        return [sample for sample in found if sample is not None]

    def trained_into(self, version: str) -> list[tuple[str, int]]:
        """(rollout, row) of every sample of the step that made `version`."""
        query = "SELECT rollout, row FROM samples WHERE version = ? ORDER BY rollout, row"
        return [(rollout, row) for rollout, row in self._rows(query, version)]

    def _decoded(self, kind: type[T], data: bytes, rollout: str) -> T | None:
        """The record in a blob; None, and noted, where it cannot be read."""
        try:
            return decode(kind, zlib.decompress(data))
        except (zlib.error, SchemaError, TypeError):
            self.unreadable.add(rollout)
            return None

    def _where(self, condition: str, value: str) -> list[Line]:
        found = self._rows(f"SELECT {LINE} FROM rollouts WHERE {condition} ORDER BY n", value)
        return [_line(row) for row in found]

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, explained(self._path):
            return self._db.execute(query, values).fetchall()


def opened(path: Path) -> ArchiveReader:
    """The archive of a run that exists, to be read; nothing in its folder is written.

    Raises:
        SchemaError: it is of a newer schema version.
        StoreError: there is none, or it is damaged.
    """
    if not path.is_file():
        raise StoreError(f"{path}: no archive of rollouts: the run has not started, or it was removed")
    with explained(path):
        found = schema.connect_reading(path)
    return ArchiveReader(path, found.db, found.close)


def _line(row: Sequence[Any]) -> Line:
    *fields, versions, digest = row
    names = ("rollout", "group", "task", "trace", "job", "outcome", "value", "turns", "sampled", "seconds")
    return Line(
        **dict(zip((*names, "wall"), fields, strict=True)),
        versions=tuple(str(versions).split()),
        digest=digest,
    )
