"""Counters of the factory.

Role: what `stats()` reads. Neighbours: `attempt` counts rollouts, `factory` counts groups. Invariant:
counters only grow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rollwright.rollout.base import FactoryStats
from rollwright.types import CallStatus, Scored


@dataclass
class Tally:
    """Mutable twin of `FactoryStats`; `success` is the value from which a rollout counts as one."""

    success: float
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

    def rollout(self, scored: Scored) -> None:
        """Count a rollout that ended."""
        rollout, value = scored.rollout, scored.score.value
        self.rollouts += 1
        self.sampled_tokens += sampled_tokens(scored)
        for turn in rollout.turns:
            self.model_seconds += turn.model_seconds
            self.tool_seconds += turn.tool_seconds
            self.calls += len(turn.results)
            self.failed_calls += sum(result.status is not CallStatus.OK for result in turn.results)
        if value is not None:
            self.scored += 1
            self.reward_sum += value
            self.successes += value >= self.success
        elif rollout.outcome.scorable:
            self.unscorable += 1
        else:
            self.voided += 1

    def group(self, reason: str) -> None:
        """Count a group: "" is kept."""
        match reason:
            case "":
                self.groups_kept += 1
            case "all right":
                self.groups_all_right += 1
            case "all wrong":
                self.groups_all_wrong += 1
            case _:
                self.groups_incomplete += 1

    def stats(self) -> FactoryStats:
        """The counters now."""
        counters = asdict(self)
        del counters["success"]
        return FactoryStats(**counters)


def sampled_tokens(scored: Scored) -> int:
    """Tokens the policy chose in this rollout."""
    return sum(int(row.sampled.sum()) for row in scored.rollout.rows)
