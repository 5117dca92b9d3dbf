"""A conversation that only appends.

Role: the `Conversation` of templates that keep history as it was. Neighbours: a template hands itself in;
`episode` asks. Invariant: nothing that was given before is looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollwright.agents.base import Continuation, Template
from rollwright.types import Ints, Message, ToolSpec


class Appending:
    """Start, then observation after observation."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ints:
        """See `Conversation.start`."""
        return self._template.start(messages, tools)

    def observe(self, said: Sequence[int], contents: Sequence[str], *, closed: bool) -> Continuation:
        """See `Conversation.observe`."""
        tokens = self._template.observation(contents, closed=closed)
        return Continuation(tokens, 0 if closed else injected(tokens, self._template.stop))


def injected(tokens: Ints, stop: Sequence[int]) -> int:
    """How many of `tokens` end the turn before them: up to the first stop token."""
    return next((at + 1 for at, id in enumerate(tokens.tolist()) if id in stop), 0)
