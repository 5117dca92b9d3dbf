"""The guard: when it stops a run, when it only speaks, and what it says."""

import pytest
from msgspec.structs import replace

from rollwright.errors import NoSignal
from rollwright.rollout.base import FactoryStats
from rollwright.trainer.signal import SignalGuard


def wrong(stats: FactoryStats, groups: int = 1) -> FactoryStats:
    """`groups` more of four wrong rollouts each."""
    more = stats.groups_all_wrong + groups
    return replace(stats, groups_all_wrong=more, scored=stats.scored + 4 * groups)


def right(stats: FactoryStats, groups: int = 1) -> FactoryStats:
    return replace(
        stats,
        groups_all_right=stats.groups_all_right + groups,
        scored=stats.scored + 4 * groups,
        successes=stats.successes + 4 * groups,
    )


def kept(stats: FactoryStats, groups: int = 1) -> FactoryStats:
    return replace(
        stats,
        groups_kept=stats.groups_kept + groups,
        scored=stats.scored + 4 * groups,
        successes=stats.successes + groups,
    )


def test_a_policy_that_never_succeeds_stops_the_run_with_advice() -> None:
    guard, stats = SignalGuard(patience=8), FactoryStats()
    for _ in range(7):
        stats = wrong(stats)
        assert guard.check(stats) is None
    with pytest.raises(NoSignal) as caught:
        guard.check(wrong(stats))
    text = str(caught.value)
    for part in ("last 8 groups", "8 all wrong", "0 of 32", "warm start longer", "easier", "larger"):
        assert part in text


def test_one_group_with_signal_begins_the_count_anew() -> None:
    guard, stats = SignalGuard(patience=4, low=0.0), FactoryStats()
    for _ in range(5):
        for _ in range(3):
            stats = wrong(stats)
            assert guard.check(stats) is None
        stats = kept(stats)
        assert guard.check(stats) is None


def test_a_policy_that_collapses_later_is_told_apart() -> None:
    guard, stats = SignalGuard(patience=4), kept(FactoryStats(), 10)
    guard.check(stats)
    with pytest.raises(NoSignal, match="lost what it could do"):
        guard.check(wrong(stats, 4))


def test_rollouts_that_all_fail_are_not_called_wrong_answers() -> None:
    with pytest.raises(NoSignal, match=r"6 incomplete.*look at the errors"):
        SignalGuard(patience=6).check(FactoryStats(groups_incomplete=6))


def test_groups_that_are_too_small_are_not_called_too_hard() -> None:
    with pytest.raises(NoSignal, match="min_members"):
        SignalGuard(patience=4).check(replace(FactoryStats(), groups_incomplete=4, scored=4, successes=1))


def test_solved_tasks_are_said_once_and_stop_nothing() -> None:
    guard, stats = SignalGuard(patience=4), right(FactoryStats(), 4)
    text = guard.check(stats)
    assert text is not None
    assert "4 all right" in text
    assert "learnt" in text
    assert guard.check(right(stats, 10)) is None


@pytest.mark.parametrize(("successes", "warned"), [(3, True), (4, False)])
def test_a_weak_start_is_warned_of_once(successes: int, warned: bool) -> None:
    guard = SignalGuard(patience=5, low=0.1)
    few = FactoryStats(groups_kept=2, groups_all_wrong=2, scored=30, successes=1)
    assert guard.check(few) is None  # too early to judge
    start = FactoryStats(groups_kept=3, groups_all_wrong=7, scored=40, successes=successes)
    text = guard.check(start)
    assert (text is not None) is warned
    if text:
        assert "7.5% of 40 rollouts" in text
        assert "warm start longer" in text
    assert guard.check(replace(start, groups_kept=4)) is None
