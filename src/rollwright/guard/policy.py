"""What a task allows.

Role: the default guard. Neighbours: the chain. Invariant: default-deny; a tool, and with it its side effect,
is allowed only where the task lists it by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rollwright.guard.base import GuardEvent
from rollwright.types import Decision, ToolCall, Verdict


class AllowList:
    """Allows the tools that the task names: the list is the task author's consent to their side effects."""

    name = "allow-list"

    async def check(self, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
        tool = event.call.name
        if tool in event.allowed_tools:
            return Verdict(decision=Decision.ALLOW, rule=self.name)
        near = difflib.get_close_matches(tool, event.allowed_tools, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return Verdict(decision=Decision.DENY, rule=self.name, reason=f"no tool '{tool}' here{hint}")
