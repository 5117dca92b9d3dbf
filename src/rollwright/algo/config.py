"""Configuration of the algorithms.

Role: what `[algorithm]` holds. Neighbours: the implementations, imported when built. Invariant: no value
that is accepted here makes an algorithm fail.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollwright.algo.base import Algorithm
from rollwright.plugins import PartConfig


class GrpoConfig(PartConfig):
    """Mean-centred rewards within a group."""

    type: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation."""
    scale: Literal["none", "std"] = "none"
    """Divide by: "std", the standard deviation of the group (favours very easy and very hard tasks), or
    nothing."""
    aggregation: Literal["token", "sequence"] = "token"
    """What counts the same: each sampled "token", or each rollout ("sequence") however long."""
    bound: float = Field(default=10.0, gt=0, le=1e6)
    """Largest magnitude of an advantage."""

    def build(self) -> Algorithm:
        """The algorithm."""
        from rollwright.algo.grpo import Grpo

        return Grpo(scale=self.scale, aggregation=self.aggregation, bound=self.bound)


class RlooConfig(PartConfig):
    """Leave-one-out baseline within a group."""

    type: Literal["rloo"] = "rloo"
    """REINFORCE leave-one-out."""
    aggregation: Literal["token", "sequence"] = "sequence"
    """What counts the same: each sampled "token", or each rollout ("sequence") however long."""
    bound: float = Field(default=10.0, gt=0, le=1e6)
    """Largest magnitude of an advantage."""

    def build(self) -> Algorithm:
        """The algorithm."""
        from rollwright.algo.rloo import Rloo

        return Rloo(aggregation=self.aggregation, bound=self.bound)
