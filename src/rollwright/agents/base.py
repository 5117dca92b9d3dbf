"""The agent seam: from a task to a rollout.

Role: drives engine and tools for one rollout. Neighbours: the rollout factory gives it a `Session`; it
gives back a `Rollout`. Invariants: tokens are appended, never re-encoded; every action goes through
`session.door`; an agent ends with one outcome and lets only `SandboxLost`, `EngineError`,
`DeadlineExceeded` and cancellation through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollwright.clock import Clock
from rollwright.engine.base import Engine
from rollwright.events import Sink, TraceContext
from rollwright.model.base import Vocabulary
from rollwright.sandbox.base import Sandbox
from rollwright.tools.base import Door
from rollwright.types import Identity, Ints, Message, Rollout, Row, Sampling, Task, ToolSpec, Turn


class Codec(Protocol):
    """Text ↔ token ids."""

    @property
    def size(self) -> int:
        """Number of ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; control pieces in it stay literal text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control ids decode to their names; bytes that are not UTF-8 become U+FFFD."""

    def vocabulary(self) -> Vocabulary:
        """What each id spells."""


@dataclass(frozen=True)
class Continuation:
    """What the policy is given after a turn."""

    tokens: Ints
    """int32[N]: to append to the row; the whole prompt of a new row where `fork`."""
    injected: int = 0
    """How many of them, from the first, end a turn that the policy left open."""
    fork: bool = False
    """The template rewrote what came before, so that the row cannot go on."""


class Conversation(Protocol):
    """How one rollout's conversation becomes tokens while it grows."""

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ints:
        """int32[P]: the first prompt. Called once, first."""

    def observe(self, said: Sequence[int], contents: Sequence[str], *, closed: bool) -> Continuation:
        """What follows the assistant turn of ids `said` (stop token included where `closed`), holding the
        tool results `contents`."""


class Template(Protocol):
    """How conversations become tokens."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @property
    def marks(self) -> tuple[str, str]:
        """What opens and closes a call in an assistant turn's text."""

    def conversation(self) -> Conversation:
        """A new conversation: append-only, so that turn N+1 extends turn N, or one that forks rows where
        the template rewrites history."""

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ints:
        """Tokens of the first prompt, ending where the assistant speaks."""

    def observation(self, contents: Sequence[str], *, closed: bool) -> Ints:
        """Tokens from after an assistant turn to where the assistant speaks again, holding the tool
        results. `closed` says that the turn was ended by a sampled stop token; if not, the stop token is
        injected first."""

    def text(self, ids: Sequence[int]) -> str:
        """What an assistant turn says, its control pieces as text, the stop token left out."""


class ScriptTemplate(Template, Protocol):
    """A template that also writes what an assistant says, for demonstrations."""

    def say_call(self, call: str) -> Ints:
        """int32[N]: the assistant turn that makes one call (`calls.render` of it)."""

    def say_answer(self, text: str) -> Ints:
        """int32[N]: the assistant turn that answers."""


@dataclass
class Draft:
    """What there is of a rollout so far: asked for where it broke, so that people see what came before."""

    rows: Callable[[], tuple[Row, ...]] = tuple
    turns: Callable[[], tuple[Turn, ...]] = tuple


@dataclass(frozen=True)
class Session:
    """Everything one rollout may use."""

    identity: Identity
    engine: Engine
    door: Door
    codec: Codec
    template: Template
    sandbox: Sandbox
    sampling: Sampling
    clock: Clock
    trace: TraceContext
    events: Sink
    deadline: float
    """`clock.now()` at which the rollout must have ended."""
    draft: Draft = field(default_factory=Draft)
    """Where the agent says how far it is."""


class Agent(Protocol):
    """Whoever works on a task. A team of agents is an agent too."""

    async def run(self, task: Task, session: Session) -> Rollout:
        """One attempt, from the first token to the outcome."""
