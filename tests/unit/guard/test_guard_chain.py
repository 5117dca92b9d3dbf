"""The most restrictive verdict wins, whatever the order, whatever breaks."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollwright.guard.base import GuardEvent
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.types import Decision, Identity, SideEffect, ToolCall, Verdict

EVENT = GuardEvent(
    identity=Identity(run="r"),
    call=ToolCall(id="1", name="sql", arguments={}),
    allowed_tools=("sql",),
    side_effect=SideEffect.ONCE,
)


class Fixed:
    """Says what it was told to say, or fails as it was told to."""

    def __init__(self, answer: object, name: str = "fixed") -> None:
        self.answer, self.name = answer, name
        self.asked = 0

    async def check(self, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
        self.asked += 1
        if self.answer == "hang":
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


def ask(*guards: Fixed | AllowList, timeout: float = 5.0, event: GuardEvent = EVENT) -> Verdict:
    return asyncio.run(GuardChain(guards, timeout=timeout).check(event, ()))


VERDICTS = st.builds(
    Verdict,
    decision=st.sampled_from(Decision),
    rule=st.sampled_from(["a", "b", "c"]),
    reason=st.sampled_from(["", "x"]),
    arguments=st.none() | st.just({"query": "1"}) | st.just({"query": "2"}),
)
ANSWERS = VERDICTS | st.sampled_from([ValueError("broken"), None, "allow", 0])


@given(answers=st.lists(ANSWERS, min_size=1, max_size=5), data=st.data())
def test_order_does_not_matter_and_every_guard_is_asked(answers: list[object], data: st.DataObject) -> None:
    guards = [Fixed(answer, f"g{i}") for i, answer in enumerate(answers)]
    verdict = ask(*guards)
    assert [guard.asked for guard in guards] == [1] * len(guards)
    again = ask(*data.draw(st.permutations(guards)))
    assert (again.decision, again.rule, again.reason) == (verdict.decision, verdict.rule, verdict.reason)
    decisions = [a.decision if isinstance(a, Verdict) else Decision.DENY for a in answers]
    conflict = decisions.count(Decision.MODIFY) > 1 and verdict.decision is Decision.DENY
    assert verdict.decision is max(decisions) or (conflict and max(decisions) < Decision.DENY)


@given(answers=st.lists(ANSWERS, min_size=1, max_size=4), extra=ANSWERS)
@example(
    answers=[
        Verdict(decision=Decision.MODIFY, rule="a"),
        Verdict(decision=Decision.MODIFY, rule="b", arguments={"query": "1"}),
    ],
    extra=Verdict(decision=Decision.CONFIRM, rule="c"),
)
def test_adding_a_guard_never_widens(answers: list[object], extra: object) -> None:
    before = ask(*map(Fixed, answers)).decision
    after = ask(*map(Fixed, [*answers, extra])).decision
    assert after >= before
    denied = ask(*map(Fixed, answers), Fixed(Verdict(decision=Decision.DENY, rule="no")))
    assert denied.decision >= Decision.DENY


@pytest.mark.parametrize("answer", [RuntimeError("boom"), None, "allow", {"decision": 0}, "hang"])
def test_a_guard_that_fails_denies_and_is_named(answer: object) -> None:
    verdict = ask(Fixed(Verdict(decision=Decision.ALLOW, rule="yes")), Fixed(answer, "flaky"), timeout=0.05)
    assert verdict.decision is Decision.DENY
    assert verdict.rule == "flaky/failed"


def test_no_guard_denies() -> None:
    assert ask().decision is Decision.DENY


def test_two_ways_to_modify_deny() -> None:
    ways = [Fixed(Verdict(decision=Decision.MODIFY, rule=r, arguments={"q": r})) for r in ("a", "b")]
    verdict = ask(*ways)
    assert (verdict.decision, verdict.rule) == (Decision.DENY, "chain/conflict")


@given(name=st.text(max_size=12), allowed=st.lists(st.sampled_from(["sql", "python", "shell"]), unique=True))
def test_the_allow_list_is_default_deny(name: str, allowed: list[str]) -> None:
    event = GuardEvent(
        identity=EVENT.identity,
        call=ToolCall(id="1", name=name, arguments={}),
        allowed_tools=tuple(allowed),
        side_effect=SideEffect.NONE,
    )
    verdict = ask(AllowList(), event=event)
    assert (verdict.decision is Decision.ALLOW) == (name in allowed)


def test_a_near_miss_is_told() -> None:
    event = GuardEvent(
        identity=EVENT.identity,
        call=ToolCall(id="1", name="sqk", arguments={}),
        allowed_tools=("sql",),
        side_effect=SideEffect.ONCE,
    )
    assert "did you mean 'sql'?" in ask(AllowList(), event=event).reason
