"""What is shown of failed rollouts: how they ended, what came of their calls, and one of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollwright.monitor.evidence import CUT, MENDS, evidence
from rollwright.types import (
    CallStatus,
    Finish,
    Identity,
    Message,
    Outcome,
    Part,
    Rollout,
    Score,
    Scored,
    Task,
    ToolCall,
    ToolResult,
    Turn,
)

TASK = Task(
    id="t", set="s", messages=(Message(role="user", content="price of tea?"),), tools=("sql",), checks=()
)


def scored(
    value: float | None,
    *calls: tuple[CallStatus, str],
    outcome: Outcome = Outcome.ANSWERED,
    finish: Finish = Finish.STOP,
) -> Scored:
    turns = [
        Turn(
            row=0,
            start=0,
            end=0,
            text="<call>sql …</call>",
            finish=finish,
            calls=(ToolCall(id="c", name="sql", arguments={}),),
            results=(ToolResult(call="c", status=status, content=content),),
        )
        for status, content in calls
    ]
    rollout = Rollout(identity=Identity(run="r"), rows=(), turns=tuple(turns), outcome=outcome)
    parts = (
        Part(name="calls_succeed", layer="status", value=1),
        Part(name="answer", layer="meaning", value=value or 0),
    )
    return Scored(rollout=rollout, score=Score(value=value, parts=parts if value is not None else ()))


def test_calls_that_were_cut_name_the_limit() -> None:
    cut = "error: call cut at the token limit"
    tried = [
        (TASK, scored(0, (CallStatus.MALFORMED, cut), finish=Finish.LENGTH, outcome=Outcome.MAX_TURNS))
    ] * 9
    lines = evidence([*tried, (TASK, scored(1, (CallStatus.OK, "4")))])
    assert f"10 calls: malformed (mostly: {cut}) 90 % → {CUT}; ok 10 %" in lines
    assert f"turns: cut at the token limit 90 % → {CUT}" in lines
    assert lines[0] == "rollouts ended: max_turns 90 % → raise tasks.limits.max_turns; answered 10 %"
    assert "checks that failed first: answer 90 %" in lines
    shown = lines[lines.index("one that failed:") :]
    assert any("price of tea?" in line for line in shown) and any("[malformed]" in line for line in shown)


def test_the_one_that_is_shown_failed_as_most_did() -> None:
    denied = scored(0, (CallStatus.DENIED, "error: denied"))
    odd = scored(0, (CallStatus.TIMEOUT, "error: timeout"))
    lines = evidence([(TASK, odd), (TASK, denied), (TASK, denied)])
    assert any("[denied]" in line for line in lines) and not any("[timeout]" in line for line in lines)


def test_without_calls_or_failures_there_is_less_to_say() -> None:
    assert evidence([]) == []
    assert evidence([(TASK, scored(0))])[1] == "calls: none in any rollout → more warmstart.steps"
    assert evidence([(TASK, scored(1, (CallStatus.OK, "4")))]) == [
        "rollouts ended: answered 100 %",
        "1 calls: ok 100 %",
    ]
    assert "one that failed:" not in evidence([(TASK, scored(0.5))], success=0.5)


calls = st.lists(st.tuples(st.sampled_from(CallStatus), st.text(max_size=200)), max_size=4)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, 0.0, 1.0]), calls, st.sampled_from(Outcome), st.sampled_from(Finish)
        ),
        max_size=8,
    )
)
def test_any_rollouts_can_be_told(
    made: list[tuple[float | None, list[tuple[CallStatus, str]], Outcome, Finish]],
) -> None:
    lines = evidence(
        [
            (TASK, scored(value, *called, outcome=outcome, finish=finish))
            for value, called, outcome, finish in made
        ]
    )
    assert bool(lines) == bool(made)
    told = " ".join(lines)
    for outcome, mend in MENDS.items():
        if isinstance(outcome, Outcome) and any(outcome is each for _, _, each, _ in made):
            assert f"{outcome.value} " in told and mend in told
