"""Configuration of the agent.

Role: the branch `agent`. Neighbours: `tool_agent`. Invariant: limits that belong to a task stay in the task.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollwright.agents.base import Agent
from rollwright.plugins import PartConfig


class AgentConfig(PartConfig):
    """The tool-using agent."""

    type: Literal["tool"] = "tool"
    observation_characters: int = Field(2000, ge=80)
    """Longest tool result shown to the model, in characters; the rest is replaced by how much it was."""
    calls_per_turn: int = Field(4, ge=1)
    """Calls of one turn that are made; further ones are answered with an error."""

    calls: Literal["free", "enforced"] = "free"
    """`enforced`: decoding is held to well-formed calls of the task's tools, with arguments that fit their
    schemas (extra `grammar`). A policy learns the form of calls then only from what it may still choose."""

    def build(self) -> Agent:
        """The agent; it holds no state and serves any number of rollouts at once."""
        from rollwright.agents.tool_agent import ToolAgent

        return ToolAgent(self)
