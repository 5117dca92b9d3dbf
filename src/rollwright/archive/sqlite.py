"""The archive in one SQLite file of the run folder, `rollouts.db`.

Role: the one implementation. Neighbours: the rollout process adds rollouts, the trainer process adds
samples, `report` and `trace` read while both go on (`reader`); `schema` holds the tables. Invariants: every
record carries the wire schema; tasks are kept by the digest of their content; no text of a rollout is an
error: what has no encoding is replaced, and a record that cannot be stored is kept without it. What is
written survives the process (WAL), and a power cut up to the last moments: the ledger beside it is what must
never lose anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from rollwright.archive import schema
from rollwright.archive.base import Trained
from rollwright.archive.reader import LINE, ArchiveReader, opened
from rollwright.database import explained
from rollwright.types import PolicyVersion, Sample, Scored, Task
from rollwright.wire import encode

__all__ = ["SqliteArchive", "opened"]

PENDING = 64
"""Rollouts that wait in memory before they are written."""
LEVEL = 1
"""Of zlib: 0.1 ms a rollout; tokens and turns shrink to about a quarter."""
LARGEST = 2**28
"""Bytes of one stored record; a larger one is kept without its text."""


class _Stored(NamedTuple):
    """One rollout as it is written."""

    task: tuple[str, str, bytes]
    line: tuple[object, ...]
    body: bytes
    versions: tuple[str, ...]


class SqliteArchive(ArchiveReader):
    """The archive at `path`, made if there is none, migrated if it is older. One object for each process.

    Raises:
        SchemaError: the file is of a newer schema version.
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._pending: list[_Stored] = []
        self._digests: set[str] = set()
        with explained(path):
            db = schema.connect(path)
        super().__init__(path, db, db.close)

    def add(self, task: Task, scored: Scored) -> None:
        stored = _stored(task, scored)
        with self._lock:
            self._pending.append(stored)
            if len(self._pending) >= PENDING:
                self.flush()

    def flush(self) -> None:
        with self._lock, explained(self._path):
            if not self._pending:
                return
            pending = self._pending
            new = {s.task[0]: s.task for s in pending if s.task[0] not in self._digests}
            with schema.transaction(self._db):
                self._db.executemany("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?)", new.values())
                self._db.executemany(
                    f"INSERT OR REPLACE INTO rollouts ({LINE}) VALUES ({','.join('?' * 13)})",
                    [s.line for s in pending],
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO bodies VALUES (?, ?)", [(s.line[0], s.body) for s in pending]
                )
                self._db.executemany(
                    "INSERT OR REPLACE INTO made VALUES (?, ?)",
                    [(version, s.line[0]) for s in pending for version in s.versions],
                )
            self._pending = []
            self._digests.update(new)

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
        with self._lock, explained(self._path), schema.transaction(self._db):
            self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", written)

    def close(self) -> None:
        with self._lock:
            try:
                self.flush()
            finally:
                self._pending = []
                super().close()


def _stored(task: Task, scored: Scored) -> _Stored:
    """What is written of a rollout: as it is, in text that has an encoding, or without any text."""
    for mend in (_same, _sound):
        try:
            return _record(mend(task), mend(scored))
        except Exception as error:  # boundary: whatever a policy or a tool wrote, it ends no run
            why = f"{type(error).__name__}: {error}"
    note = f"its record could not be stored ({_sound(why)[:200]}): only this line of it was"
    bare = Task(
        id=_sound(task.id), set=_sound(task.set), messages=(), tools=(), checks=(), tags={"left out": note}
    )
    identity = _sound(scored.rollout.identity)
    rollout = replace(scored.rollout, identity=identity, rows=(), turns=(), answer=None, error=note)
    found = _record(bare, replace(scored, rollout=rollout, score=replace(scored.score, parts=(), reason="")))
    versions = " ".join(map(str, scored.rollout.versions))
    counts = (len(scored.rollout.turns), _sampled(scored))
    line = (*found.line[:7], *counts, *found.line[9:11], versions, found.line[12])
    return found._replace(line=line, versions=tuple(versions.split()))


def _record(task: Task, scored: Scored) -> _Stored:
    data = encode(task)
    digest, body = schema.digest_of(data), _packed(encode(scored))
    if len(body) > LARGEST:
        raise ValueError(f"{len(body)} bytes are more than {LARGEST}")
    rollout, identity = scored.rollout, scored.rollout.identity
    versions = tuple(str(version) for version in rollout.versions)
    line = (
        identity.rollout,
        identity.group,
        identity.task,
        identity.trace,
        identity.job,
        rollout.outcome.value,
        scored.score.value,
        len(rollout.turns),
        _sampled(scored),
        rollout.seconds,
        rollout.started,
        " ".join(versions),
        digest,
    )
    return _Stored((digest, task.id, _packed(data)), line, body, versions)


def _sampled(scored: Scored) -> int:
    return sum(int(row.sampled.sum()) for row in scored.rollout.rows)


def _same(value: Any) -> Any:
    return value


def _sound(value: Any) -> Any:
    """`value` with a question mark for each character that has no encoding (a lone surrogate)."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case Struct():
            return replace(value, **{name: _sound(getattr(value, name)) for name in value.__struct_fields__})
        case tuple() | list():
            return type(value)([_sound(each) for each in value])
        case dict():
            return {_sound(key): _sound(each) for key, each in value.items()}
        case _:
            return value


def _packed(data: bytes) -> bytes:
    return zlib.compress(data, LEVEL)
