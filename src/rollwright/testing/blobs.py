"""Blobs in memory, and what every blob store must do.

Role: the fake and the conformance suite of `blobs.base`. Neighbours: tests of weights, checkpoints and audit.
Invariant: a check gets an empty store from `make()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from rollwright.blobs.base import Blobs
from rollwright.errors import StoreError

Make = Callable[[], Blobs]


class MemoryBlobs:
    """A dictionary by digest; `data` may be damaged by a test."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.data[digest] = data
        return digest

    def get(self, digest: str) -> bytes:
        if digest not in self.data:
            raise StoreError(f"blob {digest[:12]} is not stored")
        data = self.data[digest]
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(f"blob {digest[:12]} is damaged")
        return data

    def has(self, digest: str) -> bool:
        return digest in self.data

    def keep(self, digests: frozenset[str]) -> int:
        gone = {digest: data for digest, data in self.data.items() if digest not in digests}
        for digest in gone:
            del self.data[digest]
        return sum(map(len, gone.values()))


def missing(blobs: Blobs, digest: str) -> bool:
    """Whether `get` refuses."""
    try:
        blobs.get(digest)
    except StoreError:
        return True
    return False


def check_round_trip(make: Make) -> None:
    """What was put comes back under its SHA-256, empty or large; twice is one blob."""
    blobs = make()
    for data in (b"", b"x", bytes(range(256)) * 4096):
        digest = blobs.put(data)
        assert digest == hashlib.sha256(data).hexdigest() == blobs.put(data)
        assert blobs.has(digest) and blobs.get(digest) == data


def check_missing(make: Make) -> None:
    """What was never stored, and what is no digest, is not there."""
    blobs = make()
    unknown = hashlib.sha256(b"unknown").hexdigest()
    assert not blobs.has(unknown) and missing(blobs, unknown) and missing(blobs, "../../etc/passwd")


def check_keep(make: Make) -> None:
    """Collection deletes all but the named blobs and says how many bytes; unknown names are no error."""
    blobs = make()
    kept, gone = blobs.put(b"kept"), blobs.put(b"collected")
    blobs.put(b"collected")
    assert blobs.keep(frozenset({kept, "0" * 64})) == len(b"collected")
    assert blobs.get(kept) == b"kept" and not blobs.has(gone) and missing(blobs, gone)
    assert blobs.put(b"collected") == gone and blobs.get(gone) == b"collected"
    assert blobs.keep(frozenset()) == len(b"kept") + len(b"collected")


CHECKS: tuple[Callable[[Make], None], ...] = (check_round_trip, check_missing, check_keep)
