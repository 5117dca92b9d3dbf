"""Which groups are too old, or of a branch that was left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import LineageError
from rollwright.testing.records import make_group, make_row
from rollwright.trainer.staleness import fresh, group_lag
from rollwright.types import Disposition, Group, Lineage, PolicyVersion


def at(step: int, incarnation: int = 0, run: str = "run") -> PolicyVersion:
    return PolicyVersion(run=run, incarnation=incarnation, step=step)


def group(*versions: PolicyVersion, id: str = "g0") -> Group:
    """One member for each version."""
    rows = [[make_row("PPSS", version=version)] for version in versions]
    return make_group([1.0] * len(versions), rows=rows, id=id)


@pytest.mark.parametrize(("lag", "kept"), [(0, True), (4, True), (5, False)])
def test_lag_is_bounded(lag: int, kept: bool) -> None:
    screened = fresh([group(at(10 - lag), at(10))], Lineage(run="run"), at(10), 4)
    assert bool(screened.kept) is kept
    assert [d.disposition for d in screened.drops] == ([] if kept else [Disposition.STALE] * 2)
    assert all(f"lag {lag}" in d.reason for d in screened.drops)


def test_the_oldest_token_decides_also_within_a_rollout() -> None:
    rows = [[make_row("PPSS", version=at(9)), make_row("PPSS", version=at(3))]]
    assert group_lag(make_group([1.0], rows=rows), Lineage(run="run"), at(10)) == 7


def test_after_a_rollback_the_branch_left_behind_is_abandoned() -> None:
    lineage = Lineage(run="run").fork(5)  # incarnation 1 goes on from step 5
    now = at(6, incarnation=1)
    screened = fresh(
        [
            group(at(5), id="common"),
            group(at(5), at(7), id="left"),  # one member of the branch is enough
            group(at(6, incarnation=1), id="own"),
        ],
        lineage,
        now,
        4,
    )
    assert [g.id for g in screened.kept] == ["common", "own"]
    assert [(d.rollout, d.disposition) for d in screened.drops] == [
        ("left/0", Disposition.ABANDONED),
        ("left/1", Disposition.ABANDONED),
    ]


def test_a_group_from_the_future_is_not_trained() -> None:
    screened = fresh([group(at(7))], Lineage(run="run"), at(6), 4)
    assert not screened.kept
    assert screened.drops[0].disposition is Disposition.ABANDONED


def test_another_run_is_an_error() -> None:
    with pytest.raises(LineageError, match="other"):
        fresh([group(at(1, run="other"))], Lineage(run="run"), at(1), 4)


def test_a_group_that_sampled_nothing_has_no_lag() -> None:
    nothing = make_group([1.0], rows=[[make_row("PPTT")]])
    assert group_lag(nothing, Lineage(run="run"), at(3)) == 0


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), max_size=6), st.integers(0, 12))
def test_every_rollout_is_kept_or_dropped(steps: list[list[int]], now: int) -> None:
    groups = [group(*map(at, members), id=f"g{i}") for i, members in enumerate(steps)]
    screened = fresh(groups, Lineage(run="run"), at(now), 3)
    kept = [m.rollout.identity.rollout for g in screened.kept for m in g.members]
    started = [m.rollout.identity.rollout for g in groups for m in g.members]
    assert sorted(kept + [d.rollout for d in screened.drops]) == sorted(started)
    for g in screened.kept:
        lag = group_lag(g, Lineage(run="run"), at(now))
        assert lag is not None
        assert 0 <= lag <= 3
