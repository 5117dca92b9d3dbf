"""The rollout seam: from tasks to scored groups.

Role: what the conductor asks of the factory. Neighbours: agents below, queue above. Invariants: every
started rollout is in the ledger before its first token; a bad rollout never ends a step; unfinished ones
are voided and re-sampled, with a bound.
"""

from __future__ import annotations

from msgspec import Struct

from rollwright.types import Group


class GroupReport(Struct, frozen=True, kw_only=True):
    """What came of one group: kept (`group`), or dropped with a reason."""

    group: Group | None
    task: str
    reason: str = ""
    attempts: int = 1
    voided: int = 0


class FactoryStats(Struct, kw_only=True):
    """Counters since the start. Whoever counts keeps its own; what `stats()` gives is a copy."""

    rollouts: int = 0
    voided: int = 0
    unscorable: int = 0
    groups_kept: int = 0
    groups_all_right: int = 0
    groups_all_wrong: int = 0
    groups_incomplete: int = 0
    sampled_tokens: int = 0
    reward_sum: float = 0.0
    scored: int = 0
    successes: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    calls: int = 0
    failed_calls: int = 0
