"""Configuration of the rollout factory.

Role: the branch `rollout`. Neighbours: `factory`. Invariant: every wait and every retry here has a bound.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rollwright.plugins import PartConfig


class RolloutConfig(PartConfig):
    """Groups, deadlines, sampling."""

    group_size: int = Field(8, ge=1)
    """Rollouts of one task that share a baseline."""
    min_members: int = Field(4, ge=1)
    """Scorable rollouts that a group needs; with fewer it is dropped."""
    concurrency: int = Field(32, ge=1)
    """Rollouts at once. Each holds a sandbox, so not more than the sandboxes' `max_live`."""
    groups_ahead: int = Field(2, ge=0)
    """Groups in flight beyond those that fill `concurrency`, so that a slow rollout leaves no slot empty."""
    group_seconds: float = Field(180.0, gt=0)
    """Wall seconds from a group's first rollout to its end; what is unfinished then is voided."""
    sandbox_seconds: float = Field(60.0, gt=0)
    """Wall seconds for making or closing one sandbox."""
    reward_seconds: float = Field(60.0, gt=0)
    """Wall seconds for scoring one rollout; later it is unscorable."""
    grace_seconds: float = Field(5.0, ge=0)
    """What an agent that ignores its rollout's deadline gets on top before it is cancelled."""
    max_attempts: int = Field(3, ge=1)
    """Tries for one member of a group; a voided rollout is sampled again up to this bound."""
    max_regroups: int = Field(2, ge=0)
    """Fresh tasks in place of one whose rewards were all equal, before its place stays empty."""
    success: float = Field(1.0, gt=0, le=1)
    """Value from which a rollout counts as a success."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of training rollouts; 1 keeps the whole distribution."""

    @model_validator(mode="after")
    def _fits(self) -> RolloutConfig:
        if self.min_members > self.group_size:
            raise ValueError(
                f"min_members {self.min_members} exceeds group_size {self.group_size}; no group could be kept"
            )
        return self

    @property
    def width(self) -> int:
        """Groups in flight."""
        return -(-self.concurrency // self.group_size) + self.groups_ahead
