"""Counters of the factory.

Role: what `stats()` reads. Neighbours: `attempt` counts rollouts, `factory` counts groups. Invariant:
counters only grow.
"""

from __future__ import annotations

from msgspec.structs import replace

from rollwright.rollout.base import FactoryStats
from rollwright.types import CallStatus, Scored


class Tally:
    """Counts into a `FactoryStats`; `success` is the value from which a rollout counts as one."""

    def __init__(self, success: float) -> None:
        self._success = success
        self._counted = FactoryStats()

    def rollout(self, scored: Scored) -> None:
        """Count a rollout that ended."""
        rollout, value, counted = scored.rollout, scored.score.value, self._counted
        counted.rollouts += 1
        counted.sampled_tokens += sampled_tokens(scored)
        for turn in rollout.turns:
            counted.model_seconds += turn.model_seconds
            counted.tool_seconds += turn.tool_seconds
            counted.calls += len(turn.results)
            counted.failed_calls += sum(result.status is not CallStatus.OK for result in turn.results)
        if value is not None:
            counted.scored += 1
            counted.reward_sum += value
            counted.successes += value >= self._success
        elif rollout.outcome.scorable:
            counted.unscorable += 1
        else:
            counted.voided += 1

    def group(self, reason: str) -> None:
        """Count a group: "" is kept."""
        match reason:
            case "":
                self._counted.groups_kept += 1
            case "all right":
                self._counted.groups_all_right += 1
            case "all wrong":
                self._counted.groups_all_wrong += 1
            case _:
                self._counted.groups_incomplete += 1

    def stats(self) -> FactoryStats:
        """The counters now."""
        return replace(self._counted)


def sampled_tokens(scored: Scored) -> int:
    """Tokens the policy chose in this rollout."""
    return sum(int(row.sampled.sum()) for row in scored.rollout.rows)
