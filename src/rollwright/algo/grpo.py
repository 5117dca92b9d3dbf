"""Group-relative policy optimisation: a rollout is as good as it is better than its siblings.

Role: an algorithm. Neighbours: `credit` below it; the trainer takes what it gives. Invariant: that of
`base`. Sources: GRPO arXiv 2402.03300; no division by the standard deviation, Dr. GRPO 2503.20783; token
mean and no zero-variance groups, DAPO 2503.14476.
"""

from __future__ import annotations

from typing import Literal

from rollwright.algo.credit import Aggregation, centred, samples, voters
from rollwright.types import Group, Sample


class Grpo:
    """A = R − mean of the group's scorable rewards, on every sampled token.

    Args:
        scale: "none", or "std" to divide by the group's standard deviation.
        aggregation: "token" or "sequence" mean; see `credit.samples`.
        bound: largest magnitude of an advantage.
    """

    def __init__(
        self,
        *,
        scale: Literal["none", "std"] = "none",
        aggregation: Aggregation = "token",
        bound: float = 10.0,
    ) -> None:
        self.scale, self.aggregation, self.bound = scale, aggregation, bound

    def samples(self, group: Group) -> list[Sample]:
        """See `Algorithm.samples`."""
        rewards = [value for _, value in voters(group)]
        advantages = centred(rewards, standardise=self.scale == "std")
        return samples(group, advantages, aggregation=self.aggregation, bound=self.bound)
