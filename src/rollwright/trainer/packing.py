"""From samples to micro-batches: which rows go together, and which of their tokens are computed.

Role: between samples and tensors. Neighbours: `torch_trainer`. Invariants: each row with a weighted token
is in exactly one micro-batch; how rows are packed changes neither loss nor gradient. What is never needed
isn't computed: tokens behind a row's last weighted one, and scores of positions that predict no weighted
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollwright.types import Floats, Ints, PolicyVersion, Row, Sample


@dataclass(frozen=True)
class Example:
    """One row as the trainer sees it; every array has length T, and only tokens with a weight are trained."""

    name: str
    tokens: Ints
    weights: Floats
    advantages: Floats
    behaviour: Floats
    fresh: npt.NDArray[np.bool_]
    """Where the token was sampled by the very version that consumes it."""

    @classmethod
    def of_sample(cls, sample: Sample, consuming: PolicyVersion) -> Example:
        """A sample of a batch."""
        fresh = np.zeros(len(sample.row.tokens), dtype=np.bool_)
        for span in sample.row.spans:
            fresh[span.start : span.end] = span.version == consuming
        return cls(
            name=sample.rollout,
            tokens=sample.row.tokens,
            weights=np.where(sample.row.sampled, sample.weights, np.float32(0)),
            advantages=sample.advantages,
            behaviour=sample.row.logprobs,
            fresh=fresh,
        )

    @classmethod
    def of_row(cls, row: Row, name: str) -> Example:
        """A demonstration: weight 1 on the tokens marked as sampled."""
        zeros = np.zeros(len(row.tokens), dtype=np.float32)
        weights = row.sampled.astype(np.float32)
        return cls(name, row.tokens, weights, zeros, zeros, np.zeros(len(zeros), dtype=np.bool_))

    @property
    def trained(self) -> npt.NDArray[np.intp]:
        """Indices of the tokens with a weight."""
        return np.flatnonzero(self.weights)

    def check(self, context: int, vocab: int) -> None:
        """Refuse what would silently train wrong.

        Raises:
            ValueError: the row doesn't fit the model, its first token has a weight (nothing predicts it), a
            weight is
                negative, or a number of a trained token isn't finite.
        """
        at, length = self.trained, len(self.tokens)
        if length > context:
            raise ValueError(
                f"rollout {self.name}: a row of {length} tokens, the model's context is {context}"
            )
        if length and not 0 <= self.tokens.min() <= self.tokens.max() < vocab:
            raise ValueError(f"rollout {self.name}: token ids outside the vocabulary of {vocab}")
        if at.size and at[0] == 0:
            raise ValueError(
                f"rollout {self.name}: the row's first token has a weight, but nothing predicts it"
            )
        if (self.weights < 0).any():
            raise ValueError(f"rollout {self.name}: a weight is negative")
        for what, values in (
            ("advantage", self.advantages),
            ("weight", self.weights),
            ("behaviour logprob", self.behaviour),
        ):
            if not np.isfinite(values[at]).all():
                raise ValueError(f"rollout {self.name}: a trained token's {what} is not finite")


@dataclass(frozen=True)
class MicroBatch:
    """N tokens of some rows back to back, and the K of them that a weighted token follows."""

    ids: Tensor
    """int64[N]."""
    lengths: tuple[int, ...]
    keep: Tensor
    """int64[K]: where the hidden state predicts a trained token."""
    targets: Tensor
    """int64[K]: that token; the next three belong to it."""
    weights: Tensor
    advantages: Tensor
    behaviour: Tensor
    fresh: Tensor
    """bool[K]."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> MicroBatch:
        """Examples that all have a trained token."""
        trained = [example.trained for example in examples]
        lengths = [int(at[-1]) for at in trained]
        starts = np.cumsum([0, *lengths[:-1]])

        def gather(arrays: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
            return np.concatenate([array[at] for array, at in zip(arrays, trained, strict=True)])

        ids = np.concatenate([e.tokens[:n] for e, n in zip(examples, lengths, strict=True)])
        keep = np.concatenate([start + at - 1 for start, at in zip(starts, trained, strict=True)])
        return cls(
            ids=torch.from_numpy(ids.astype(np.int64)),
            lengths=tuple(lengths),
            keep=torch.from_numpy(keep.astype(np.int64)),
            targets=torch.from_numpy(gather([e.tokens for e in examples]).astype(np.int64)),
            weights=torch.from_numpy(gather([e.weights for e in examples])),
            advantages=torch.from_numpy(gather([e.advantages for e in examples])),
            behaviour=torch.from_numpy(gather([e.behaviour for e in examples])),
            fresh=torch.from_numpy(gather([e.fresh for e in examples])),
        )

    @property
    def padded(self) -> int:
        """Tokens that attention works on: rows × the longest."""
        return len(self.lengths) * max(self.lengths)


def pack(examples: Sequence[Example], budget: int) -> list[MicroBatch]:
    """Micro-batches of rows of like length, each of at most `budget` tokens with padding, or of one longer
    row.

    Examples without a weighted token are left out: they have no part in the loss.
    """
    ordered = sorted((e for e in examples if e.trained.size), key=lambda e: int(e.trained[-1]), reverse=True)
    bins: list[list[Example]] = []
    room = 0
    for example in ordered:
        if not room:  # the longest comes first, so it sets the width of its micro-batch
            bins.append([])
            room = max(1, budget // int(example.trained[-1]))
        bins[-1].append(example)
        room -= 1
    return [MicroBatch.of(each) for each in bins]


def padding_share(micros: Sequence[MicroBatch]) -> float:
    """Share of attention's tokens that are padding."""
    return 1.0 - sum(sum(m.lengths) for m in micros) / sum(m.padded for m in micros)
