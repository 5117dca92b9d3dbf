"""The tool-using agent: the engine speaks, its calls are made, what came back is observed.

Role: the built-in `Agent`. Neighbours: the rollout factory runs it. Invariant: stateless; a session is one
rollout.
"""

from __future__ import annotations

from rollwright.agents.base import Session
from rollwright.agents.config import AgentConfig
from rollwright.agents.episode import Episode
from rollwright.types import Rollout, Task


class ToolAgent:
    """Runs rollouts with the session's engine."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config

    async def run(self, task: Task, session: Session) -> Rollout:
        """One attempt, from the first token to the outcome.

        Outcomes: `ANSWERED` (a turn without calls), `MAX_TURNS`, `CONTEXT_FULL`, `TERMINATED` (by the guard),
        `TURN_TIMEOUT`, `ROLLOUT_TIMEOUT`, `REVOKED` (the engine aborted the request).

        Raises:
            SandboxLost, EngineError: the infrastructure failed.
        """
        return await Episode(task, session, self.config).run()
