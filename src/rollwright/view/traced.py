"""What a trace holds: one thing of a run and everything connected with it, upstream and downstream.

Role: the records of `rollwright trace`. Neighbours: `trace` fills them, `trace_text` draws them, `--json`
prints them as they are. Invariant: what is unknown is None or empty.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from rollwright.types import Json

Kind = Literal["task", "group", "rollout", "call", "sample", "version"]


class Brief(Struct, frozen=True, kw_only=True):
    """A rollout in one line: how it ended, and where it went."""

    rollout: str
    group: str
    task: str
    outcome: str
    value: float | None
    disposition: str
    reason: str
    version: str
    """The version that it was trained into; "" where it wasn't."""


class Audited(Struct, frozen=True, kw_only=True):
    """An entry of the audit log."""

    log: str
    number: int
    wall: float
    kind: str
    body: Json


class CallSeen(Struct, frozen=True, kw_only=True):
    """A tool call: what was asked, what came back, what the guard and the door wrote down."""

    id: str
    name: str
    arguments: dict[str, Json]
    raw: str
    status: str
    content: str
    seconds: float
    audit: list[Audited]


class TurnSeen(Struct, frozen=True, kw_only=True):
    """A turn of the model: `versions` made its tokens, `mean_logprob` (nats) is how sure they were."""

    number: int
    text: str
    tokens: int
    versions: list[str]
    mean_logprob: float | None
    model_seconds: float
    tool_seconds: float
    calls: list[CallSeen]


class SampleSeen(Struct, frozen=True, kw_only=True):
    """What the trainer took of a row: its trained tokens with the range of their advantages."""

    id: str
    """`ROLLOUT#ROW`."""
    version: str
    tokens: int
    advantage_low: float
    advantage_high: float
    weight: float
    committed: bool
    """False for a step that was never committed (the run was killed before)."""


class PartSeen(Struct, frozen=True, kw_only=True):
    """What one check gave; `detail` says what a failed one lacked."""

    name: str
    value: float
    detail: str


class RolloutSeen(Struct, frozen=True, kw_only=True):
    """A rollout whole."""

    brief: Brief
    trace: str
    job: str
    attempt: int
    answer: str | None
    error: str | None
    seconds: float
    wall: float
    parts: list[PartSeen]
    turns: list[TurnSeen]
    samples: list[SampleSeen]


class TaskSeen(Struct, frozen=True, kw_only=True):
    """What was asked."""

    id: str
    set: str
    messages: list[tuple[str, str]]
    """(role, content)."""
    checks: list[str]


class CommitSeen(Struct, frozen=True, kw_only=True):
    """An optimiser step that became durable."""

    version: str
    position: int
    checkpoint: str
    kept: bool
    """Whether the checkpoint's blob is still there; only the newest ones are."""
    trained: int
    dropped: int


class WeightsSeen(Struct, frozen=True, kw_only=True):
    """A push of a version's weights into an engine."""

    version: str
    digest: str
    gap: float
    wall: float


class Trace(Struct, frozen=True, kw_only=True):
    """One thing and what is connected with it. Lists are complete."""

    run: str
    kind: Kind
    id: str
    task: TaskSeen | None = None
    siblings: list[Brief] = []
    """Rollouts of the same group, or all of the task or group that was asked for."""
    rollout: RolloutSeen | None = None
    call: str = ""
    """The call that was asked for, one of `rollout`'s."""
    commit: CommitSeen | None = None
    """The step that trained it, or the one that made the version asked for."""
    weights: list[WeightsSeen] = []
    trained: list[Brief] = []
    """Rollouts that the version asked for was trained on."""
    made: list[Brief] = []
    """Rollouts of which the version asked for sampled a token."""
    damaged: list[str] = []
    """Lines of the audit logs that are not what was written; they were passed over."""
