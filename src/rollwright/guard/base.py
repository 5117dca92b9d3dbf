"""The guard seam: decided before the action, never beside it.

Role: one verdict on one action. Neighbours: the door asks, `chain` combines. Invariants: default-deny; a
guard that raises or times out denies; the most restrictive verdict of several wins, whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from rollwright.types import Identity, Json, SideEffect, ToolCall, Verdict


class GuardEvent(Struct, frozen=True, kw_only=True):
    """What a guard is asked about."""

    identity: Identity
    call: ToolCall
    allowed_tools: tuple[str, ...]
    """Tools the task names; everything else is denied."""
    side_effect: SideEffect


class Guard(Protocol):
    """Says what may be done."""

    name: str

    async def check(self, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
        """A verdict on `event` after the calls in `history`."""


class Audit(Protocol):
    """Append-only record of every action: asked, decided, done."""

    def append(self, kind: str, identity: Identity, call: str, body: dict[str, Json]) -> str:
        """Write one entry durably enough to survive the process; returns its digest."""
