"""What group-relative algorithms share: who votes, the centred rewards, and how an advantage becomes samples.

Role: the arithmetic under `grpo` and `rloo`. Neighbours: the algorithms of this package. Invariants: only
scorable members vote; results are finite for any finite rewards; a rollout's total weight doesn't depend on
how many rows hold it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollwright.types import Group, Rollout, Sample

Aggregation = Literal["token", "sequence"]

RESIDUE = 1e-9
"""Rewards whose spread is smaller than this share of the largest one count as equal: what is left is
rounding."""

HUGE = 1e150
"""Differences are cut off near here; far above any bound, far below overflow."""


def voters(group: Group) -> list[tuple[Rollout, float]]:
    """The members whose reward says something about the policy: a scorable outcome and a finite value."""
    return [
        (member.rollout, member.score.value)
        for member in group.members
        if member.rollout.outcome.scorable
        and member.score.value is not None
        and math.isfinite(member.score.value)
    ]


def centred(rewards: npt.ArrayLike, *, standardise: bool = False) -> npt.NDArray[np.float64]:
    """R − mean(R), float64[n]; divided by the standard deviation with `standardise`. All 0 where nothing
    differs.

    Computed on rewards divided by the largest magnitude, so that no finite reward overflows on the way.
    """
    values = np.asarray(rewards, dtype=np.float64)
    largest = np.abs(values).max(initial=0.0)
    unit = values / largest if largest else values
    if len(values) < 2 or np.ptp(unit) < RESIDUE:
        return np.zeros(len(values))
    differences = unit - unit.mean()
    if standardise:
        return np.asarray(differences / differences.std())
    return np.asarray(differences * min(largest, HUGE))


def samples(
    group: Group, advantages: npt.NDArray[np.float64], *, aggregation: Aggregation, bound: float
) -> list[Sample]:
    """A sample for each row of each voter; `advantages` float64[voters], cut to ±`bound`. Empty where all
    are 0.

    Weight of a sampled token: 1 for "token" (the trainer's mean is over tokens), or 1 ÷ sampled tokens of the
    rollout for "sequence" (its mean is over rollouts).
    """
    bounded = np.clip(advantages, -bound, bound).astype(np.float32)
    made: list[Sample] = []
    for (rollout, _), advantage in zip(voters(group), bounded, strict=True):
        masks = [row.sampled for row in rollout.rows]
        weight = 1.0 if aggregation == "token" else 1.0 / max(1, sum(int(mask.sum()) for mask in masks))
        made += [
            Sample(
                rollout=rollout.identity.rollout,
                group=group.id,
                row=row,
                advantages=np.where(mask, advantage, np.float32(0)),
                weights=np.where(mask, np.float32(weight), np.float32(0)),
            )
            for row, mask in zip(rollout.rows, masks, strict=True)
            if mask.any()
        ]
    return made if bounded.any() else []
