"""The reward seam: a rollout in, a `Score` out.

Role: says what a rollout was worth. Neighbours: the factory asks while the sandbox is still alive;
algorithms use the value. Invariants: a score is finite or unscorable with a reason, never NaN; the grader
works outside the agent's reach; an infrastructure failure is unscorable, not 0.
"""

from __future__ import annotations

from typing import Protocol

from rollwright.sandbox.base import Sandbox
from rollwright.types import Rollout, Score, Task


class Reward(Protocol):
    """Scores rollouts."""

    async def score(self, task: Task, rollout: Rollout, sandbox: Sandbox | None) -> Score:
        """The score of `rollout`; `sandbox` is the agent's, after its last action (None where it is lost)."""
