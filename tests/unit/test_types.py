"""The invariants that records keep by themselves: lineage, outcomes, rows, verdicts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import LineageError
from rollwright.testing.records import make_group, make_row, sampled_runs
from rollwright.types import (
    Decision,
    Disposition,
    Group,
    Lineage,
    Outcome,
    PolicyVersion,
    Provenance,
    Score,
)

RUN = "run"
MOVES = st.lists(st.one_of(st.just(-1), st.integers(0, 12)), max_size=25)
"""A run's life: −1 is an optimiser step, k ≥ 0 a rollback or resume at step k (or at the newest, if
smaller)."""


def live(moves: list[int]) -> tuple[Lineage, list[PolicyVersion], list[PolicyVersion]]:
    """The lineage after `moves`, every version there ever was, and those that the newest one descends
    from."""
    lineage, step = Lineage(run=RUN), 0
    ever, ancestors = [lineage.version(0)], [lineage.version(0)]
    for move in moves:
        if move < 0:
            step += 1
        else:
            step = min(move, step)
            lineage = lineage.fork(step)
            ancestors = [version for version in ancestors if version.step <= step]
        ever.append(lineage.version(step))
        ancestors.append(lineage.version(step))
    return lineage, ever, ancestors


@given(MOVES)
def test_lag_is_never_negative_and_abandoned_branches_have_none(moves: list[int]) -> None:
    lineage, ever, ancestors = live(moves)
    newest = ever[-1]
    for version in ever:
        lag = lineage.lag(newest, version)
        if version in ancestors:
            assert lag == newest.step - version.step >= 0
        else:
            assert lag is None


@given(MOVES)
def test_numbers_never_run_backwards(moves: list[int]) -> None:
    _, ever, _ = live(moves)
    assert ever == sorted(ever) and len(set(ever)) == len(ever)


@given(MOVES)
def test_the_future_has_no_lag(moves: list[int]) -> None:
    lineage, ever, _ = live(moves)
    newest = ever[-1]
    assert lineage.lag(newest, newest.next()) is None
    assert lineage.lag(newest, lineage.fork(newest.step).version(newest.step)) is None


def test_a_rollback_by_hand() -> None:
    """Steps 0 to 5, back to 3, on to 4: what was made at 4 and 5 before is abandoned, 3 is one step old."""
    lineage = Lineage(run=RUN).fork(3)
    now = lineage.version(4)
    old = [PolicyVersion(run=RUN, step=step) for step in range(6)]
    assert [lineage.lag(now, version) for version in old] == [4, 3, 2, 1, None, None]
    assert lineage.lag(now, lineage.version(3)) == 1
    assert lineage.lag(PolicyVersion(run=RUN, incarnation=2, step=9), now) is None  # no such incarnation yet


@pytest.mark.parametrize("other", [{"run": "another"}, {"policy": "critic"}])
def test_other_runs_cannot_be_compared(other: dict[str, str]) -> None:
    lineage, mine = Lineage(run=RUN), PolicyVersion(run=RUN)
    theirs = PolicyVersion(**({"run": RUN} | other))
    for pair in ((mine, theirs), (theirs, mine)):
        with pytest.raises(LineageError, match="is not of run"):
            lineage.lag(*pair)


def test_next_is_one_step_on() -> None:
    version = PolicyVersion(run=RUN, policy="p", incarnation=2, step=7)
    assert version.next() == PolicyVersion(run=RUN, policy="p", incarnation=2, step=8) > version
    assert str(version) == "p@2.7"


def test_the_oldest_version_of_a_group() -> None:
    new, old = PolicyVersion(run=RUN, step=5), PolicyVersion(run=RUN, step=3)
    rows = [[make_row("PS", version=new)], [make_row("PS", version=new), make_row("PS", version=old)]]
    group = make_group([1.0, 0.0], rows=rows)
    assert group.oldest == old and group.members[1].rollout.versions == (old, new)
    assert make_group([1.0], rows=[[make_row("PPT")]]).oldest is None
    assert Group(id="g", task="t", members=()).oldest is None


@given(st.text(alphabet="PSTI", min_size=1, max_size=30))
def test_only_sampled_tokens_are_marked(pattern: str) -> None:
    row = make_row(pattern)
    assert row.sampled.tolist() == [letter == "S" for letter in pattern]
    assert row.sampled.dtype == np.bool_
    covered = [i for span in row.spans for i in range(span.start, span.end)]
    assert covered == [i for i, letter in enumerate(pattern) if letter == "S"]
    assert [(span.start, span.end) for span in row.spans] == list(sampled_runs(row.provenance))


def test_infrastructure_failures_say_nothing_about_the_policy() -> None:
    scorable = {outcome for outcome in Outcome if outcome.scorable}
    assert scorable == {Outcome.ANSWERED, Outcome.MAX_TURNS, Outcome.CONTEXT_FULL, Outcome.TERMINATED}


def test_only_two_dispositions_are_open() -> None:
    assert {each for each in Disposition if each.open} == {Disposition.RUNNING, Disposition.QUEUED}


def test_unscorable_is_no_zero() -> None:
    score = Score.unscorable("sandbox lost")
    assert score.value is None and score.reason == "sandbox lost"


def test_decisions_are_ordered_by_what_they_forbid() -> None:
    order = [Decision.ALLOW, Decision.MODIFY, Decision.CONFIRM, Decision.DENY, Decision.TERMINATE]
    assert sorted(Decision) == order and max(order) is Decision.TERMINATE


def test_provenance_numbers_are_stored_and_never_change() -> None:
    assert [(each.name, each.value) for each in Provenance] == [
        *(("PROMPT", 0), ("SAMPLED", 1), ("TOOL", 2), ("INJECTED", 3))
    ]
