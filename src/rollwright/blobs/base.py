"""The blob seam: large payloads by content hash.

Role: weights, checkpoints, audit bodies, long rollouts. Neighbours: weights, trainer commits, audit.
Invariants: a digest names one content; a blob is durable before `put` returns; reading checks the digest.
"""

from __future__ import annotations

from typing import Protocol


class Blobs(Protocol):
    """Store bytes, get them back by SHA-256."""

    def put(self, data: bytes) -> str:
        """Store durably; returns the hex digest. Storing twice is one blob."""

    def get(self, digest: str) -> bytes:
        """Raises `StoreError` where it is missing or damaged."""

    def has(self, digest: str) -> bool:
        """Whether it is stored."""

    def keep(self, digests: frozenset[str]) -> int:
        """Delete everything else (garbage collection); returns the bytes freed."""
