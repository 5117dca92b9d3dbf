"""Several guards as one.

Role: combines verdicts. Neighbours: the door asks it like any guard. Invariants: every guard is asked; the
most restrictive verdict wins, whatever their order; a guard that raises, is late, or answers nonsense denies;
no guards deny.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollwright.guard.base import Guard, GuardEvent
from rollwright.types import Decision, ToolCall, Verdict


class GuardChain:
    """`timeout` is in seconds, for each guard; they are asked at the same time."""

    name = "chain"

    def __init__(self, guards: Sequence[Guard], *, timeout: float = 1.0) -> None:
        self._guards, self._timeout = tuple(guards), timeout

    async def check(self, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
        if len(self._guards) == 1:  # no task for the common case
            return await self._ask(self._guards[0], event, history)
        verdicts = await asyncio.gather(*(self._ask(guard, event, history) for guard in self._guards))
        return strictest(verdicts)

    async def _ask(self, guard: Guard, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
        try:
            async with asyncio.timeout(self._timeout):
                verdict: object = await guard.check(event, history)
        except TimeoutError:
            return _failed(guard, f"no verdict within {self._timeout:g} s")
        except Exception as failure:  # boundary: a guard that crashes denies
            return _failed(guard, f"the guard crashed: {failure!r}")
        if not isinstance(verdict, Verdict):
            return _failed(guard, f"no verdict but {type(verdict).__name__}")
        return verdict


def _failed(guard: Guard, reason: str) -> Verdict:
    return Verdict(decision=Decision.DENY, rule=f"{guard.name}/failed", reason=reason)


def strictest(verdicts: Sequence[Verdict]) -> Verdict:
    """The most restrictive verdict; among equals one that does not depend on the order. Two guards that
    want to modify differently cannot both have their way: that counts as a denial. None at all: denied."""
    if not verdicts:
        return Verdict(decision=Decision.DENY, rule="chain/empty", reason="no guard is configured")
    modify = [verdict for verdict in verdicts if verdict.decision is Decision.MODIFY]
    if any(verdict.arguments != modify[0].arguments for verdict in modify):
        rules = " and ".join(sorted({verdict.rule for verdict in modify}))
        conflict = Verdict(decision=Decision.DENY, rule="chain/conflict", reason=f"{rules} disagree")
        verdicts = [*verdicts, conflict]
    worst = max(verdict.decision for verdict in verdicts)
    equals = [verdict for verdict in verdicts if verdict.decision is worst]
    return min(equals, key=lambda verdict: (verdict.rule, verdict.reason))
