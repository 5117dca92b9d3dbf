"""One request from submission to completion.

Role: what the scheduler queues and the caller waits for. Neighbours: `engine` makes it and awaits `result`
or reads `sink`; the scheduler moves it between waiting and a batch row. Invariant: spans cover exactly the
tokens sampled, each under the version that sampled it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from rollwright.types import Chunk, Completion, Finish, Floats, Ints, PolicyVersion, Sampling, VersionSpan

Sink = asyncio.Queue[Chunk | None]


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

    def close_span(self, version: PolicyVersion) -> None:
        """What was sampled since the last span came from `version`."""
        start, end = self.spans[-1].end if self.spans else 0, len(self.tokens) - self.prompt
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def complete(self, finish: Finish, version: PolicyVersion) -> None:
        """Give the caller what there is. A stream got its tokens already; an aborted one still needs its
        last chunk."""
        self.close_span(version)
        if not self.result.done():
            self.result.set_result(
                Completion(
                    request=self.id,
                    tokens=self.tokens[self.prompt :],
                    logprobs=self.logprobs,
                    spans=tuple(self.spans),
                    finish=finish,
                    prompt_tokens=self.prompt,
                    cached=self.cached or 0,
                )
            )
        if self.sink is not None and finish is Finish.ABORT:
            none = np.empty(0, np.int32), np.empty(0, np.float32)
            self.sink.put_nowait(
                Chunk(request=self.id, tokens=none[0], logprobs=none[1], version=version, finish=finish)
            )

    def fail(self, error: Exception) -> None:
        """The caller gets `error`."""
        if not self.result.done():
            self.result.set_exception(error)
            if self.sink is not None:
                self.sink.put_nowait(None)
