"""Which groups are still young enough to train on.

Role: invariant 5 at the moment a batch is assembled, so that time in the queue counts. Neighbours: the
conductor calls it between queue and algorithm, and hands the drops to the ledger. Invariant: a group is
kept or dropped whole, because siblings share a baseline and dropping only the slow ones would favour short
rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollwright.buffer.base import Drop
from rollwright.types import Disposition, Group, Lineage, PolicyVersion


class Screened(NamedTuple):
    """Groups to train on, and the rollouts of the others with their reason."""

    kept: list[Group]
    drops: list[Drop]


def group_lag(group: Group, lineage: Lineage, consuming: PolicyVersion) -> int | None:
    """Optimiser steps between `consuming` and the oldest version that made a token of `group`, ≥ 0; None
    where some token comes from an abandoned branch. 0 where nothing was sampled.

    Raises:
        LineageError: the group belongs to another run or policy.
    """
    versions = {version for member in group.members for version in member.rollout.versions}
    lags = [lineage.lag(consuming, version) for version in versions]
    known = [lag for lag in lags if lag is not None]
    return max(known, default=0) if len(known) == len(lags) else None


def fresh(groups: Sequence[Group], lineage: Lineage, consuming: PolicyVersion, max_lag: int) -> Screened:
    """Keep groups whose lag is at most `max_lag`; the rollouts of the others are `STALE` or `ABANDONED`.

    Raises:
        LineageError: a group belongs to another run or policy.
    """
    screened = Screened([], [])
    for group in groups:
        lag = group_lag(group, lineage, consuming)
        if lag is not None and lag <= max_lag:
            screened.kept.append(group)
            continue
        if lag is None:
            disposition, reason = Disposition.ABANDONED, f"made on a branch that {consuming} left"
        else:
            disposition, reason = Disposition.STALE, f"lag {lag} at {consuming}, at most {max_lag} allowed"
        screened.drops.extend(
            Drop(rollout=member.rollout.identity.rollout, disposition=disposition, reason=reason)
            for member in group.members
        )
    return screened
