"""What every reward must do, as checks over a `make` callable.

Role: the conformance suite of `reward.base.Reward`. Neighbours: `tests/contract` runs it over our rewards, a
plug-in's tests over theirs. Invariant: a failure of the infrastructure is never a value.

Use: `@pytest.mark.parametrize("check", CHECKS)`, then `await check(make)`; `make(sandboxes, clock)` gives the
reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rollwright.clock import Clock
from rollwright.reward.base import Reward
from rollwright.sandbox.base import SandboxProvider
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.testing.records import make_rollout
from rollwright.types import AnswerEquals, Environment, Message, Outcome, Rollout, Score, Task

Make = Callable[[SandboxProvider, Clock], Reward]

TASK = Task(
    id="t0",
    set="test",
    messages=(Message(role="user", content="say yes"),),
    tools=(),
    checks=(AnswerEquals(expected="yes"),),
)


async def score(make: Make, rollout: Rollout, *, lost: bool = False) -> Score:
    """The score of `rollout` at `TASK`."""
    sandboxes = MemorySandboxes()
    sandbox = await sandboxes.create(Environment(), owner="r0")
    given = await make(sandboxes, FakeClock()).score(TASK, rollout, None if lost else sandbox)
    await sandbox.kill()
    assert not sandboxes.live, "the grader left a sandbox open"
    return given


async def infrastructure(make: Make) -> None:
    """An outcome that the policy did not bring about is unscorable, and the reason says which."""
    for outcome in Outcome:
        if not outcome.scorable:
            given = await score(make, make_rollout(outcome=outcome, answer="yes"))
            assert given.value is None
            assert outcome.value in given.reason


async def finite(make: Make) -> None:
    """What the policy brought about gets a finite value, whatever it said."""
    for outcome in (outcome for outcome in Outcome if outcome.scorable):
        for answer in (None, "", "yes", "nan", "1e999", "\x00", "x" * 10_000):
            given = await score(make, make_rollout(outcome=outcome, answer=answer))
            assert given.value is not None
            assert math.isfinite(given.value)


async def repeats(make: Make) -> None:
    """The same rollout is worth the same."""
    rollout = make_rollout(answer="yes")
    assert await score(make, rollout) == await score(make, rollout)


async def tells(make: Make) -> None:
    """A good answer is worth more than a bad one."""
    good = (await score(make, make_rollout(answer="yes"))).value
    bad = (await score(make, make_rollout(answer="no"))).value
    assert good is not None
    assert bad is not None
    assert good > bad


async def lost(make: Make) -> None:
    """A lost sandbox never raises."""
    await score(make, make_rollout(answer="yes"), lost=True)


CHECKS = (infrastructure, finite, repeats, tells, lost)
