"""The engine seam: tokens in, tokens out, with logprobs, versions and cache counts.

Role: what every inference engine offers. Neighbours: agents and evaluations call it, the conductor pushes
weights into it. Invariants: ids and logprobs come back exactly as sampled; logprobs are those of the
distribution sampled from (see `Sampling`); every token belongs to one version span; the prefix
cache is keyed by policy version; an engine whose weights differ from the trainer's probe gets no traffic.
`rollwright.testing.engines` holds the conformance suite.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from rollwright.types import Chunk, Completion, Floats, Ints, PolicyVersion, Probe, Sampling


class PauseMode(enum.Enum):
    """What happens to requests in flight while paused. New requests always wait."""

    WAIT = "wait"
    """Finish them first, then pause."""
    KEEP = "keep"
    """Freeze them where they are; after `resume` they go on, with a new version span if the weights
    changed."""
    ABORT = "abort"
    """End them now with `Finish.ABORT`, returning the tokens so far."""


class InFlight(enum.Enum):
    """What new weights do to requests that are being generated."""

    CONTINUE = "continue"
    """Go on under the new weights, with a version span of their own."""
    RESTART = "restart"
    """Forget what was sampled and begin again from the prompt; a streamed request, whose tokens are out
    already, stops instead."""
    STOP = "stop"
    """End with `Finish.ABORT` and the tokens so far."""


class Health(Struct, frozen=True, kw_only=True):
    """Counters since the start; rates are differences of two of these. A ratio with no data is None."""

    ready: bool
    version: PolicyVersion
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    steps: int
    busy_seconds: float
    """Seconds spent computing; the rest of the wall time the engine was idle (waiting for tools or work)."""
    idle_seconds: float
    kv_tokens: int
    """Tokens whose KV is held, by running requests and the cache together."""
    kv_capacity: int
    kv_bytes: int = 0
    """Bytes allocated for KV."""
    host_tokens: int = 0
    """Tokens whose KV lies in the host tier."""
    retracted: int = 0
    """Times a running request was put back because KV ran out."""
    constrained: int = 0
    """Completions that ended under a constraint."""
    compliant: int = 0
    """Of those: whole words of their constraint's language."""
    rate: float | None = None
    """Tokens per second of decoding, over the last windows; None before the first."""
    rate_variation: float | None = None
    """Decode stability: coefficient of variation of tokens per second over windows."""
    gap_p99: float | None = None
    """Seconds between two tokens of one request, 99th percentile."""

    @property
    def compliance(self) -> float | None:
        """Share of constrained completions that comply; None before the first."""
        return self.compliant / self.constrained if self.constrained else None

    @property
    def hit_rate(self) -> float | None:
        """Cached share of all prompt tokens; None before the first prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class Engine(Protocol):
    """An inference engine. One event loop owns it; `start`/`close` bracket its life."""

    async def start(self) -> None:
        """Begin serving. Idempotent."""

    async def close(self) -> None:
        """Stop; requests in flight raise `EngineClosed`. Idempotent."""

    async def generate(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> Completion:
        """Continue `prompt` (int32[P]).

        `request` is unique among those in flight and keys the sampling noise together with `sampling.seed`
        and the position, so that the same request repeats. `session` is an affinity hint (a rollout id).
        Of waiting requests a higher `priority` runs first.
        Cancelling the task frees everything.

        Raises:
            ContextOverflow: P leaves no room for one token.
            EngineClosed: the engine stopped.
            ConstraintError: `sampling.constraint` is no constraint, or one that this engine cannot hold to.
            ValueError: empty prompt, an id outside the vocabulary, or `request` in flight already.
        """

    def stream(
        self, prompt: Ints, sampling: Sampling, *, request: str, session: str = "", priority: int = 0
    ) -> AsyncIterator[Chunk]:
        """As `generate`, token by token; the concatenation equals what `generate` returns."""

    async def score(self, tokens: Ints, *, temperature: float = 1.0) -> Floats:
        """float32[T-1]: log p(tokens[i+1] | tokens[:i+1]) at that temperature."""

    async def abort(self, requests: Sequence[str]) -> None:
        """End these with `Finish.ABORT`; unknown ids are ignored."""

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Stop generating. Idempotent. `score` still works."""

    async def resume(self) -> None:
        """Go on. Idempotent."""

    async def update(
        self,
        state: Mapping[str, Any],
        version: PolicyVersion,
        probe: Probe | None = None,
        in_flight: InFlight = InFlight.CONTINUE,
    ) -> float:
        """Take new weights between two steps; KV of the old version is never used again, so logprobs are
        always those of one version's weights. Returns the largest absolute difference to the probe (0.0
        without one).

        Raises:
            WeightMismatch: the difference exceeds 1e-4, or names or shapes do not fit; the engine stays
                paused.
        """

    async def health(self) -> Health:
        """Counters and state; cheap."""
