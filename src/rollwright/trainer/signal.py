"""Is there anything to learn from?

Role: stops a run that only looks like one. Without reward variance within groups there is no gradient, and
from under about a tenth of successes at the start, one bad step ends a policy. Neighbours: the conductor
shows it the factory's counters after each group. Invariant: it raises only when nothing is learnt and there
is something left to learn.
"""

from __future__ import annotations

from rollwright.errors import NoSignal
from rollwright.rollout.base import FactoryStats


class SignalGuard:
    """Watches counters that only grow.

    Args:
        patience: groups in a row without signal after which it gives up.
        low: share of sampled successes under which a start is warned of.
    """

    def __init__(self, patience: int = 48, low: float = 0.1) -> None:
        self.patience, self.low = patience, low
        self._last = FactoryStats()  # as of the last group with signal
        self._told_start = self._told_solved = False

    def check(self, stats: FactoryStats) -> str | None:
        """Look at the counters now; a text where a person should know something, each thing once.

        Raises:
            NoSignal: `patience` groups in a row carried none, and fewer than half of their rollouts
            succeeded.
        """
        if stats.groups_kept > self._last.groups_kept:
            self._last = stats
        elif _groups(stats) - _groups(self._last) >= self.patience:
            warning = self._nothing(stats)
            if warning:
                return warning
        return self._start(stats)

    def _nothing(self, stats: FactoryStats) -> str | None:
        """The stretch since the last signal is long: solved, or hopeless."""
        last, seen = self._last, _groups(stats) - _groups(self._last)
        right = stats.groups_all_right - last.groups_all_right
        wrong = stats.groups_all_wrong - last.groups_all_wrong
        incomplete = stats.groups_incomplete - last.groups_incomplete
        scored, successes = stats.scored - last.scored, stats.successes - last.successes
        counted = (
            f"the last {seen} groups carried no signal: {right} all right, {wrong} all wrong, "
            f"{incomplete} incomplete; {successes} of {scored} scored rollouts succeeded"
        )
        if scored and successes * 2 >= scored:
            if self._told_solved:
                return None
            self._told_solved = True
            return f"{counted}. These tasks are learnt: stop here, or give harder ones"
        if not scored:
            likely = "every rollout failed before it could be scored: look at the errors of the rollouts"
        elif incomplete * 2 >= seen:
            likely = (
                "too few rollouts of a group could be scored (rollout.min_members): "
                "look at the errors and deadlines of the others"
            )
        elif stats.groups_kept:
            likely = (
                "the policy lost what it could do: "
                "go back to an earlier checkpoint with a lower learning rate"
            )
        else:
            likely = (
                "the policy hardly ever succeeds, so that siblings all fail alike: "
                "warm start longer, begin with easier tasks, or make groups larger"
            )
        raise NoSignal(f"{counted}. Likely {likely}")

    def _start(self, stats: FactoryStats) -> str | None:
        """A start with few successes, judged once after the first `patience` groups."""
        if self._told_start or _groups(stats) < self.patience or not stats.scored:
            return None
        self._told_start = True
        share = stats.successes / stats.scored
        if share >= self.low:
            return None
        return (
            f"sampled success starts at {share:.1%} of {stats.scored} rollouts, "
            f"under {self.low:.0%}: few groups carry signal and a bad step may end the policy; "
            "warm start longer, begin with easier tasks, or make groups larger"
        )


def _groups(stats: FactoryStats) -> int:
    """Groups that came to an end."""
    dropped = stats.groups_all_right + stats.groups_all_wrong + stats.groups_incomplete
    return stats.groups_kept + dropped
