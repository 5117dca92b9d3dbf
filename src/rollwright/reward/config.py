"""Configuration of the reward.

Role: the branch `reward`. Neighbours: `rules`. Invariant: a rollout whose meaning checks fail is worth 0 in
every mode.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollwright.clock import Clock
from rollwright.plugins import PartConfig
from rollwright.reward.base import Reward
from rollwright.sandbox.base import SandboxProvider


class RewardConfig(PartConfig):
    """Rules over what the rollout did, in three layers: status, meaning, intermediate."""

    type: Literal["rules"] = "rules"
    mode: Literal["strict", "layered"] = "strict"
    """`strict`: 1 where every check passes, else 0. `layered`: 0 unless every meaning check passes, then
    the weighted mean of the layers."""
    status: float = Field(0.2, ge=0)
    """Weight of the layer `status` in `layered`; weights of layers without checks do not count."""
    meaning: float = Field(0.6, gt=0)
    """Weight of the layer `meaning` in `layered`."""
    intermediate: float = Field(0.2, ge=0)
    """Weight of the layer `intermediate` in `layered`."""
    call_seconds: float = Field(5.0, gt=0)
    """Wall seconds for one question to a sandbox (an expression, a query, one replayed call)."""
    seconds: float = Field(30.0, gt=0)
    """Wall seconds for scoring one rollout; later it is unscorable."""

    def build(self, sandboxes: SandboxProvider, clock: Clock) -> Reward:
        """The reward; `sandboxes` gives the grader's own sandboxes, never the agent's."""
        from rollwright.reward.rules import RuleReward

        return RuleReward(sandboxes, self, clock)
