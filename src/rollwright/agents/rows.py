"""A row while it grows: tokens are appended with where they came from, and never touched again.

Role: the one maker of `Row`s in a rollout. Neighbours: `episode` appends. Invariants: sampled ids, logprobs
and version spans are exactly those of the completion; spans cover exactly the sampled tokens.
"""

from __future__ import annotations

import numpy as np

from rollwright.errors import EngineError
from rollwright.types import Completion, Floats, Ints, Marks, Provenance, Row, VersionSpan


class RowBuilder:
    """Appends to one row."""

    def __init__(self) -> None:
        self._tokens: list[Ints] = []
        self._marks: list[Marks] = []
        self._logprobs: list[Floats] = []
        self._spans: list[VersionSpan] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def given(self, tokens: Ints, provenance: Provenance) -> None:
        """Append tokens that the policy did not choose."""
        self._append(tokens, provenance, np.zeros(len(tokens), dtype=np.float32))

    def sampled(self, completion: Completion) -> tuple[int, int]:
        """Append what the policy chose; its `[start, end)` in the row.

        Raises:
            EngineError: the completion has not one logprob for each token, or its spans do not cover it.
        """
        size, edge = len(completion.tokens), 0
        for span in completion.spans:
            if span.start != edge or span.end < span.start:
                break
            edge = span.end
        if len(completion.logprobs) != size or edge != size:
            raise EngineError(
                f"request {completion.request}: {size} tokens with {len(completion.logprobs)} logprobs "
                f"and version spans up to {edge}; expected all three to agree"
            )
        start = self._size
        self._append(completion.tokens, Provenance.SAMPLED, completion.logprobs)
        self._spans += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in completion.spans
            if span.end > span.start
        ]
        return start, self._size

    def tokens(self) -> Ints:
        """int32[T]: everything so far, the prompt of the next turn."""
        return np.concatenate(self._tokens) if self._tokens else np.zeros(0, dtype=np.int32)

    def row(self) -> Row:
        """The row so far."""
        empty: list[Marks] = [np.zeros(0, dtype=np.uint8)]
        none: list[Floats] = [np.zeros(0, dtype=np.float32)]
        return Row(
            tokens=self.tokens(),
            provenance=np.concatenate(self._marks or empty),
            logprobs=np.concatenate(self._logprobs or none),
            spans=tuple(self._spans),
        )

    def _append(self, tokens: Ints, provenance: Provenance, logprobs: Floats) -> None:
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._marks.append(np.full(len(tokens), provenance, dtype=np.uint8))
        self._logprobs.append(np.asarray(logprobs, dtype=np.float32))
        self._size += len(tokens)
