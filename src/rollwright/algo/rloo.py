"""REINFORCE leave-one-out: the baseline of a rollout is the mean of the others, which leaves it unbiased.

Role: an algorithm. Neighbours: as `grpo`. Invariant: that of `base`. Source: arXiv 2402.14740, equation 8.
"""

from __future__ import annotations

from rollwright.algo.credit import Aggregation, centred, samples, voters
from rollwright.types import Group, Sample


class Rloo:
    """Aᵢ = Rᵢ − mean of the other scorable rewards = n/(n−1) · (Rᵢ − mean of all).

    Args:
        aggregation: "token" or "sequence" mean; see `credit.samples`.
        bound: largest magnitude of an advantage.
    """

    def __init__(self, *, aggregation: Aggregation = "sequence", bound: float = 10.0) -> None:
        self.aggregation, self.bound = aggregation, bound

    def samples(self, group: Group) -> list[Sample]:
        """See `Algorithm.samples`."""
        rewards = [value for _, value in voters(group)]
        advantages = centred(rewards) * (len(rewards) / max(1, len(rewards) - 1))
        return samples(group, advantages, aggregation=self.aggregation, bound=self.bound)
