"""An agent whose behaviour is a function, for tests of the factory.

Role: a fake of the agent seam. Neighbours: tests of the rollout factory. Invariant: the rollouts it gives
keep the contracts of `types` and carry the session's identity.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from rollwright.agents.base import Session
from rollwright.testing.records import make_rollout, make_row
from rollwright.types import Outcome, Rollout, Task

Act = Callable[[Task, Session], Awaitable[str | Outcome]]
"""What the agent does: gives its answer, or the outcome of a rollout without one, or raises."""


class ScriptedAgent:
    """Does what `act` says."""

    def __init__(self, act: Act) -> None:
        self._act = act

    async def run(self, task: Task, session: Session) -> Rollout:
        """One attempt, with a row of nine tokens."""
        began = session.clock.now()
        done = await self._act(task, session)
        answered = isinstance(done, str)
        rollout = make_rollout(
            [make_row()],
            outcome=Outcome.ANSWERED if answered else Outcome(done),
            answer=str(done) if answered else None,
        )
        return replace(rollout, identity=session.identity, seconds=session.clock.now() - began)
