"""From sampling to the ledger: completions, rows, rollouts, scores, groups, samples, dispositions.

Role: what flows once a task has started. Neighbours: engine → agent → factory → queue → trainer.
Invariants: every token of a `Row` carries provenance, behaviour logprob and version; a rollout has exactly
one `Outcome`.
"""

from __future__ import annotations

import enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollwright.types.record import ArrayRecord, Floats, Ints, Marks, Record
from rollwright.types.tasks import ToolCall, ToolResult
from rollwright.types.versions import Identity, PolicyVersion, VersionSpan


class Provenance(enum.IntEnum):
    """Where a token came from; only `SAMPLED` tokens get gradient."""

    PROMPT = 0
    SAMPLED = 1
    TOOL = 2
    INJECTED = 3


class Finish(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ConstraintKind(enum.Enum):
    """What language a completion must belong to; says how `Constraint.source` is read."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON text."""
    REGEX = "regex"
    """A regular expression that the whole completion matches."""
    GRAMMAR = "grammar"
    """A context-free grammar in Lark's notation."""
    CHOICE = "choice"
    """A JSON list of strings, one of which the completion is."""
    TOOLS = "tools"
    """A JSON list of tools (name, parameters as JSON schema): text, or calls whose arguments fit."""


class Constraint(Record, frozen=True, kw_only=True):
    """A language that decoding is held to: tokens that leave it are never sampled."""

    kind: ConstraintKind
    source: str


class Sampling(Record, frozen=True, kw_only=True):
    """How to sample. `temperature` 0 is greedy. The logprobs returned are those of the distribution sampled
    from: after constraint, temperature, top-k, top-p and min-p, in this order."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample from this many most likely tokens only; 0 is all."""
    min_p: float = 0.0
    """Sample only from tokens at least this share as likely as the likeliest."""
    max_tokens: int = 64
    stop: tuple[int, ...] = ()
    """Token ids that end the completion; the stop token is sampled and is part of it."""
    stop_text: tuple[str, ...] = ()
    """Strings that end the completion wherever they lie over token borders; the tokens that spell one are
    part of it."""
    seed: int = 0
    constraint: Constraint | None = None


class Completion(ArrayRecord, frozen=True, kw_only=True):
    """What an engine returns: N new tokens with their logprobs and the versions that made them."""

    request: str
    tokens: Ints
    logprobs: Floats
    spans: tuple[VersionSpan, ...]
    finish: Finish
    prompt_tokens: int = 0
    cached: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    compliant: bool | None = None
    """Whether the completion is a whole word of its constraint's language; None without a constraint."""


class Chunk(ArrayRecord, frozen=True, kw_only=True):
    """A piece of a streamed completion; the last one has `finish`."""

    request: str
    tokens: Ints
    logprobs: Floats
    version: PolicyVersion
    finish: Finish | None = None


class Outcome(enum.Enum):
    """How a rollout ended: exactly one. Only `scorable` ones say anything about the policy."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    TURN_TIMEOUT = "turn_timeout"
    ROLLOUT_TIMEOUT = "rollout_timeout"
    GROUP_TIMEOUT = "group_timeout"
    TERMINATED = "terminated"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_ERROR = "engine_error"
    REVOKED = "revoked"
    CANCELLED = "cancelled"
    ERROR = "error"

    @property
    def scorable(self) -> bool:
        """True where the policy, not the infrastructure, brought the end about."""
        return self in _SCORABLE


_SCORABLE = frozenset({Outcome.ANSWERED, Outcome.MAX_TURNS, Outcome.CONTEXT_FULL, Outcome.TERMINATED})


class Row(ArrayRecord, frozen=True, kw_only=True):
    """T tokens the trainer may see, exactly as the engine and the environment made them.

    `tokens` int32[T]; `provenance` uint8[T] (`Provenance`); `logprobs` float32[T], behaviour logprob where
    sampled, else 0; `spans` cover exactly the sampled tokens.
    """

    tokens: Ints
    provenance: Marks
    logprobs: Floats
    spans: tuple[VersionSpan, ...]

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """bool[T]: True where the policy chose the token."""
        return np.equal(self.provenance, Provenance.SAMPLED)


class Turn(Record, frozen=True, kw_only=True):
    """One model turn: sampled tokens `[start, end)` of row `row`, the calls in them and what came back."""

    row: int
    start: int
    end: int
    text: str
    finish: Finish
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    cached: int = 0
    prompt_tokens: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0


class Rollout(ArrayRecord, frozen=True, kw_only=True):
    """One attempt at one task, from its first token to its one outcome."""

    identity: Identity
    rows: tuple[Row, ...]
    turns: tuple[Turn, ...]
    outcome: Outcome
    answer: str | None = None
    error: str | None = None
    started: float = 0.0
    seconds: float = 0.0

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Every version that made a token of it."""
        return tuple(sorted({span.version for row in self.rows for span in row.spans}))


class Part(Record, frozen=True, kw_only=True):
    """One check's verdict: 0 to 1."""

    name: str
    layer: Literal["status", "meaning", "intermediate"]
    value: float
    detail: str = ""


class Score(Record, frozen=True, kw_only=True):
    """A reward value with its parts, or unscorable (`value` None) with a reason."""

    value: float | None
    parts: tuple[Part, ...] = ()
    reason: str = ""
    model_version: str = "rules"

    @classmethod
    def unscorable(cls, reason: str) -> Score:
        """A rollout about which no reward can be said."""
        return cls(value=None, reason=reason)


class Scored(ArrayRecord, frozen=True, kw_only=True):
    """A rollout with its score."""

    rollout: Rollout
    score: Score


class Group(ArrayRecord, frozen=True, kw_only=True):
    """Rollouts of one task that share a baseline. `(id, attempt)` is the queue's idempotency key."""

    id: str
    task: str
    members: tuple[Scored, ...]
    attempt: int = 0

    @property
    def oldest(self) -> PolicyVersion | None:
        """The oldest version that made a token of any member; None where nothing was sampled."""
        versions = [v for m in self.members for v in m.rollout.versions]
        return min(versions) if versions else None


class Sample(ArrayRecord, frozen=True, kw_only=True):
    """What the trainer takes: a row with a float32[T] advantage and a float32[T] loss weight for each
    token.

    Weights are 0 on every token that was not sampled.
    """

    rollout: str
    group: str
    row: Row
    advantages: Floats
    weights: Floats


class Batch(ArrayRecord, frozen=True, kw_only=True):
    """Samples of one optimiser step, and the version that consumes them."""

    samples: tuple[Sample, ...]
    version: PolicyVersion


class Disposition(enum.Enum):
    """Where a started rollout stands. The first two are open; every rollout ends in exactly one of the
    others."""

    RUNNING = "running"
    QUEUED = "queued"
    TRAINED = "trained"
    EVALUATED = "evaluated"
    VOID = "void"
    UNSCORABLE = "unscorable"
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    ABANDONED = "abandoned"
    DUPLICATE = "duplicate"
    LATE = "late"
    SURPLUS = "surplus"
    FROZEN = "frozen"

    @property
    def open(self) -> bool:
        """True while the rollout has not ended in the ledger."""
        return self in (Disposition.RUNNING, Disposition.QUEUED)
