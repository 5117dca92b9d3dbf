"""The algorithm seam: pure functions from a group to samples.

Role: credit. Neighbours: the trainer calls it and knows no algorithm by name. Invariants: an excluded
(unscorable) member changes neither its siblings' advantages nor the loss; for any finite, missing or NaN
rewards the advantages are finite and bounded; cutting a trajectory into rows keeps its total weight.
"""

from __future__ import annotations

from typing import Protocol

from rollwright.types import Group, Sample


class Algorithm(Protocol):
    """Group → samples."""

    def samples(self, group: Group) -> list[Sample]:
        """Samples with float32[T] advantages and weights; empty where the group carries no signal."""
