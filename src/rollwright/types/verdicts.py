"""What a guard says of an action.

Role: the guard's answer. Neighbours: guard, tools, audit. Invariant: decisions are ordered by how much they
forbid.
"""

from __future__ import annotations

import enum

from rollwright.types.record import Json, Record


class Decision(enum.IntEnum):
    """Ordered by how much it forbids; the most restrictive of several wins."""

    ALLOW = 0
    MODIFY = 1
    CONFIRM = 2
    DENY = 3
    TERMINATE = 4


class Verdict(Record, frozen=True, kw_only=True):
    """What a guard says of one action, and which rule said it."""

    decision: Decision
    rule: str
    reason: str = ""
    arguments: dict[str, Json] | None = None
    """The arguments to use instead, with `MODIFY`."""
