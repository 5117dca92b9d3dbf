"""The append-only record of every action, chained so that a change shows.

Role: proves what was asked, decided and done. Neighbours: the door appends; `verify` reads. Invariants: an
entry is with the operating system before `append` returns (it survives the process, not a power cut); each
entry holds the digest of the one before; one writer per file. A chain without a secret shows a change, not
who rewrote all of it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from rollwright.blobs.base import Blobs
from rollwright.clock import Clock, SystemClock
from rollwright.errors import StoreError
from rollwright.types import Identity, Json
from rollwright.wire import SCHEMA

_INLINE_BYTES = 4096
"""Larger bodies are stored as a blob, or, without a blob store, as their digest and size alone."""
_TAIL_BYTES = 1 << 20
"""Read at the end of an existing file, for its last line; no line is nearly as long."""
_START = "0" * 64


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line's content."""

    schema: int
    number: int
    wall: float
    kind: str
    identity: Identity | None
    call: str
    body: msgspec.Raw
    previous: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the entry's bytes as they were hashed, and their SHA-256."""

    entry: msgspec.Raw
    sha256: str


_lines = msgspec.json.Decoder(Line)
_entries = msgspec.json.Decoder(Entry)
_encoder = msgspec.json.Encoder(enc_hook=repr)


class AuditLog:
    """One JSONL file. An existing file is continued; a line that a killed writer left torn is cut off, and
    that is written down."""

    def __init__(self, path: Path, clock: Clock | None = None, blobs: Blobs | None = None) -> None:
        self.path = path
        self._clock, self._blobs = clock or SystemClock(), blobs
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._number, self._previous = 0, _START
        self._resume()

    def _resume(self) -> None:
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        whole, newline, torn = data.rpartition(b"\n")
        if newline or size > len(data):
            try:
                line = _lines.decode(whole.rpartition(b"\n")[2])
                self._number, self._previous = _entries.decode(line.entry).number, line.sha256
            except msgspec.MsgspecError as error:
                raise StoreError(f"{self.path}: the last line is no audit entry: {error}") from error
        if torn:
            os.ftruncate(self._file, size - len(torn))
            self._write("torn", None, "", {"bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()})

    def append(self, kind: str, identity: Identity, call: str, body: dict[str, Json]) -> str:
        """See `Audit`. Raises `StoreError` where it cannot be written: then nothing may be done."""
        return self._write(kind, identity, call, body)

    def _write(self, kind: str, identity: Identity | None, call: str, body: dict[str, Json]) -> str:
        entry = _encoder.encode(
            Entry(
                schema=SCHEMA,
                number=self._number + 1,
                wall=round(self._clock.wall(), 6),
                kind=kind,
                identity=identity,
                call=call.encode("utf-8", "replace").decode(),
                body=msgspec.Raw(self._body(body)),
                previous=self._previous,
            )
        )
        sha256 = hashlib.sha256(entry).hexdigest()
        line = b'{"entry":%s,"sha256":"%s"}\n' % (entry, sha256.encode())
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise StoreError(f"{self.path}: the audit entry could not be written: {error}") from error
        if written != len(line):
            raise StoreError(
                f"{self.path}: wrote {written} of {len(line)} bytes of an audit entry; is the disk full?"
            )
        self._number, self._previous = self._number + 1, sha256
        return sha256

    def _body(self, body: dict[str, Json]) -> bytes:
        try:
            data = _encoder.encode(body)
        except (ValueError, RecursionError):  # lone surrogates, endless nesting: written down all the same
            data = _encoder.encode({"text": ascii(body)})
        if len(data) <= _INLINE_BYTES:
            return data
        found = self._blobs.put(data) if self._blobs else hashlib.sha256(data).hexdigest()
        return _encoder.encode({"digest": found, "bytes": len(data), "stored": self._blobs is not None})

    def close(self) -> None:
        """Close it; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def verify(path: Path) -> int | None:
    """The first line (1-based) that is damaged, changed, out of order or torn; None where the chain holds."""
    previous = _START
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = _lines.decode(data)
                entry = _entries.decode(line.entry)
            except msgspec.MsgspecError:
                return number
            sound = hashlib.sha256(bytes(line.entry)).hexdigest() == line.sha256 and data.endswith(b"\n")
            if not sound or entry.previous != previous or entry.number != number:
                return number
            previous = line.sha256
    return None
