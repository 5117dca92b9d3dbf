"""One request from submission to completion.

Role: what the scheduler queues and the caller waits for. Neighbours: `engine` makes it and awaits `result`
or reads `sink`; the scheduler moves it between waiting and a batch row. Invariant: spans cover exactly the
tokens sampled, each under the version that sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollwright.engine.embedded.stops import StopText
from rollwright.engine.grammar.base import Bits, Matcher
from rollwright.errors import ConstraintError
from rollwright.types import Chunk, Completion, Finish, Floats, Ints, PolicyVersion, Sampling, VersionSpan

Sink = asyncio.Queue[Chunk | None]
Watch = Callable[[], tuple[Matcher | None, StopText | None]]


def _nothing() -> tuple[None, None]:
    return None, None


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` int32[P + N] are the prompt and what was sampled, as of the last time it left a batch row."""

    id: str
    tokens: Ints
    sampling: Sampling
    noise: int
    limit: int
    """Length of `tokens` at which it ends: prompt and max_tokens, or the context."""
    result: asyncio.Future[Completion]
    sink: Sink | None
    prompt: int
    logprobs: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[VersionSpan] = field(default_factory=list)
    cached: int | None = None
    """Prompt tokens found in the prefix cache on first admission; None before it."""
    priority: int = 0
    watch: Watch = _nothing
    """Makes the two that follow afresh."""
    came: int = 0
    """The step at which it began to wait."""
    passed: int = 0
    """How often another request was admitted before it that came later."""
    leads: bool = False
    """Whether others wait for it to compute the prefix they share."""
    follows_another: bool = False
    """Whether it waits for that."""
    matcher: Matcher | None = None
    """Where it stands in its constraint's language."""
    stop_text: StopText | None = None
    broken: Exception | None = None
    """What its constraint failed with."""

    @property
    def watched(self) -> bool:
        """Whether each of its tokens must be looked at when it comes."""
        return self.sink is not None or self.matcher is not None or self.stop_text is not None

    def mask(self, out: Bits, vocab: int) -> None:
        """Let its constraint say which of `vocab` tokens may come next. One that fails, or leaves none, makes
        the request `broken` and lets everything through: it ends with this step, and nobody else does."""
        assert self.matcher is not None, "without a constraint nothing is masked"
        try:
            self.matcher.mask(out)
            if vocab % 32:
                out[-1] &= np.uint32((1 << vocab % 32) - 1)
            if not out.any():
                self.broken = ConstraintError("the constraint leaves no token to sample")
        except Exception as error:  # boundary: a library's failure over one constraint is that request's
            self.broken = ConstraintError(f"the constraint failed: {error}")
        if self.broken is not None:
            out[:] = ~np.uint32(0)

    def follows(self, token: int) -> bool:
        """Take note of a sampled token; whether the request ends with it, as its stop strings or its
        constraint say."""
        ended = self.broken is not None
        if self.matcher is not None and not ended:
            try:
                self.matcher.accept(token)
                ended = self.matcher.ended
            except Exception as error:  # boundary: as above
                self.broken, ended = ConstraintError(f"the constraint failed: {error}"), True
        if self.stop_text is not None:
            ended |= self.stop_text.push(token) is not None
        return ended

    def begin(self) -> None:
        """Stand at the beginning of constraint and stop strings."""
        self.matcher, self.stop_text = self.watch()

    def restart(self) -> None:
        """Forget what was sampled."""
        self.tokens, self.logprobs = self.tokens[: self.prompt], self.logprobs[:0]
        self.spans.clear()
        self.begin()

    def close_span(self, version: PolicyVersion) -> None:
        """What was sampled since the last span came from `version`."""
        start, end = self.spans[-1].end if self.spans else 0, len(self.tokens) - self.prompt
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def complete(self, finish: Finish, version: PolicyVersion) -> Completion:
        """Give the caller what there is, which is returned too. A stream got its tokens already; an aborted
        one still needs its last chunk."""
        self.close_span(version)
        done = Completion(
            request=self.id,
            tokens=self.tokens[self.prompt :],
            logprobs=self.logprobs,
            spans=tuple(self.spans),
            finish=finish,
            prompt_tokens=self.prompt,
            cached=self.cached or 0,
            compliant=self.matcher.complete if self.matcher is not None else None,
        )
        if not self.result.done():
            self.result.set_result(done)
        if self.sink is not None and (finish is Finish.ABORT or not len(done.tokens)):
            none = np.empty(0, np.int32), np.empty(0, np.float32)
            self.sink.put_nowait(
                Chunk(request=self.id, tokens=none[0], logprobs=none[1], version=version, finish=finish)
            )
        return done

    def fail(self, error: Exception) -> None:
        """The caller gets `error`."""
        if not self.result.done():
            self.result.set_exception(error)
            if self.sink is not None:
                self.sink.put_nowait(None)
