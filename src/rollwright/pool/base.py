"""The pool seam: leases over slices of machines.

Role: every worker (engine, trainer, sandboxes) works under a lease and honours `revoke`. Neighbours: the
conductor asks, workers hold. Invariants: slices handed out never exceed the capacity; a lease ends exactly
once; a revoked worker stops by the deadline.
"""

from __future__ import annotations

import enum
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class WorkKind(enum.Enum):
    """What a lease is for."""

    SAMPLING = "sampling"
    TRAINING = "training"
    SANDBOX = "sandbox"
    EVALUATION = "evaluation"


class Lease(Protocol):
    """The right to use `slices`, until given back or revoked."""

    id: str
    kind: WorkKind
    slices: int

    @property
    def revoked(self) -> bool:
        """True from the moment the pool wants it back."""

    async def wait_revoked(self) -> float:
        """Return when the pool wants it back: seconds left until the deadline."""

    def check(self) -> None:
        """Raise `LeaseRevoked` if it was revoked; workers call this between two pieces of work."""


class Pool(Protocol):
    """Hands out leases."""

    def lease(
        self, kind: WorkKind, *, slices: int = 1, priority: int = 0, timeout: float = 60.0
    ) -> AbstractAsyncContextManager[Lease]:
        """Wait for and hold a lease. Raises `DeadlineExceeded` after `timeout` seconds, `ConfigError` where
        it can never fit."""

    async def revoke(self, lease: str, deadline: float) -> None:
        """Take a lease back: its holder has `deadline` seconds."""

    def held(self) -> dict[WorkKind, int]:
        """Slices in use by kind."""
