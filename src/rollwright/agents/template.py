"""How a conversation becomes tokens, for policies trained with our own tokenizer.

Role: the `Template` of `PieceTokenizer` policies. Neighbours: `episode` appends what it gives; the
conductor builds the tokenizer with `CONTROL`. Invariants: append-only, so turn N+1 extends turn N; control
ids come from here and from the policy, never from content, so a message that spells one stays text.

`<|system|>…<|end|><|user|>…<|end|><|assistant|>` `<call>sql …</call><|end|>`
`<|tool|>…<|end|><|assistant|>` `…<|end|>`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rollwright.agents.base import Codec, Conversation
from rollwright.agents.calls import CLOSE, OPEN
from rollwright.agents.conversation import Appending
from rollwright.types import Ints, Message, ToolSpec

SYSTEM, USER, ASSISTANT, TOOL, END = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"
CONTROL = (SYSTEM, USER, ASSISTANT, TOOL, END, OPEN, CLOSE)
"""The control pieces that a tokenizer for this template must have."""

_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class ControlCodec(Codec, Protocol):
    """A codec with control ids that no text encodes to."""

    def control(self, name: str) -> int:
        """Id of a control piece. Raises `ConfigError` where there is none."""


class PieceTemplate:
    """Roles and calls as control pieces. Tools are not described in the prompt: a policy that is trained
    from nothing knows them from its warm start, and every token saved makes a small machine faster."""

    def __init__(self, codec: ControlCodec) -> None:
        self._codec = codec
        self._id = {name: codec.control(name) for name in CONTROL}

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        return (self._id[END],)

    @property
    def marks(self) -> tuple[str, str]:
        """What opens and closes a call."""
        return OPEN, CLOSE

    def conversation(self) -> Conversation:
        """Append-only."""
        return Appending(self)

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ints:
        """int32[P]: the first prompt, ending where the assistant speaks."""
        ids: list[int] = []
        for message in messages:
            ids += self._message(_ROLES[message.role], message.content)
        return _ints([*ids, self._id[ASSISTANT]])

    def observation(self, contents: Sequence[str], *, closed: bool) -> Ints:
        """int32[N]: tool results, then the assistant's mark; first the stop token where the turn was not
        `closed`."""
        ids = [] if closed else [self._id[END]]
        for content in contents:
            ids += self._message(TOOL, content)
        return _ints([*ids, self._id[ASSISTANT]])

    def text(self, ids: Sequence[int]) -> str:
        """What an assistant turn says, its control pieces as text, the stop token left out."""
        said = [int(id) for id in ids]
        return self._codec.decode(said[:-1] if said[-1:] == [self._id[END]] else said)

    def say_call(self, call: str) -> Ints:
        """int32[N]: the assistant turn that makes one call (`calls.render` of it), for scripts."""
        return _ints([self._id[OPEN], *self._codec.encode(call), self._id[CLOSE], self._id[END]])

    def say_answer(self, text: str) -> Ints:
        """int32[N]: the assistant turn that answers, for scripts."""
        return _ints([*self._codec.encode(text), self._id[END]])

    def _message(self, role: str, content: str) -> list[int]:
        return [self._id[role], *self._codec.encode(content), self._id[END]]


def _ints(ids: list[int]) -> Ints:
    return np.array(ids, dtype=np.int32)
