"""What happens to a group's rollouts: the open ones in the ledger, and whether the group teaches anything.

Role: bookkeeping of one group. Neighbours: `attempt` starts and ends rollouts here, `factory` settles the
group. Invariant: a rollout that was started through a `Book` ends in the ledger, or is handed over to the
queue, on every path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollwright.buffer.base import Drop, Ledger
from rollwright.rollout.tally import Tally
from rollwright.types import Disposition, Identity, Scored

_GROUP = re.compile(r".*-g(\d+)")

EQUAL = 1e-9
"""Rewards that differ by no more than this are equal."""


def number_of(group: str) -> int:
    """The task number in the id of a training group; -1 for any other id."""
    found = _GROUP.fullmatch(group)
    return int(found[1]) if found else -1


def next_number(started: Sequence[Identity]) -> int:
    """The task number after the largest one among the training groups of `started`; 0 where there is none."""
    return 1 + max((number_of(each.group) for each in started if each.job == "train"), default=-1)


class Book:
    """The rollouts of one group (or evaluation) that are open in the ledger."""

    def __init__(self, ledger: Ledger, tally: Tally) -> None:
        self._ledger = ledger
        self._open: set[str] = set()
        self.tally = tally
        self.voided = 0
        """Rollouts that ended without a score."""

    def start(self, identity: Identity) -> None:
        """Write a rollout down before its first token. Raises `StoreError` for a known id."""
        self._ledger.start((identity,))
        self._open.add(identity.rollout)

    def end(self, rollouts: Sequence[str], disposition: Disposition, reason: str) -> None:
        """Give open rollouts their disposition; those that have one already are left alone."""
        ending = [rollout for rollout in rollouts if rollout in self._open]
        if ending:
            self._ledger.drop([Drop(rollout=each, disposition=disposition, reason=reason) for each in ending])
            self._open.difference_update(ending)

    def void(self, rollout: str, disposition: Disposition, reason: str) -> None:
        """End a rollout without a score, and count it."""
        self.voided += 1
        self.end([rollout], disposition, reason)

    def hand_over(self, rollouts: Sequence[str]) -> None:
        """These stay open; from now on they belong to whoever puts the group into the queue."""
        self._open.difference_update(rollouts)

    def close(self, reason: str) -> None:
        """Void whatever is open; does nothing where all is settled."""
        self.end(sorted(self._open), Disposition.VOID, reason)


def no_signal(members: Sequence[Scored], success: float) -> str:
    """Why the group teaches nothing: `all right`, `all wrong`, or "" where its rewards differ."""
    values = [member.score.value for member in members if member.score.value is not None]
    if not values or max(values) - min(values) > EQUAL:
        return ""
    return "all right" if min(values) >= success - EQUAL else "all wrong"


def mean(members: Sequence[Scored]) -> float | None:
    """Mean value of the scored members; None without any."""
    values = [member.score.value for member in members if member.score.value is not None]
    return sum(values) / len(values) if values else None
