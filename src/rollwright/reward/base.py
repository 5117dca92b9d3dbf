"""The reward seam: a rollout in, a `Score` out.

Role: says what a rollout was worth. Neighbours: the factory asks while the sandbox is still alive;
algorithms use the value. Invariants: a score is finite or unscorable with a reason, never NaN; the grader
works outside the agent's reach; an infrastructure failure is unscorable, not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rollwright.sandbox.base import Sandbox
from rollwright.types import Json, Rollout, Score, Task


class Reward(Protocol):
    """Scores rollouts."""

    async def score(self, task: Task, rollout: Rollout, sandbox: Sandbox | None) -> Score:
        """The score of `rollout`; `sandbox` is the agent's, after its last action (None where it is lost)."""


class Scorer(Protocol):
    """Somebody else's judgement of an answer, for the check `scored_by`; registered as a class in the
    entry-point group `rollwright.scorers`. It runs in our process and must execute nothing of what it is
    given."""

    def score(self, arguments: Mapping[str, Json], answer: str) -> float:
        """0 to 1."""
