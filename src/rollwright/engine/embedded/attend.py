"""How the tokens of one step see each other: through the KV rows.

Role: the decoder's `Attend` over cached KV. Neighbours: `step` makes one for each forward; `kv` holds the
rows. Invariant: a token sees exactly the positions up to its own in its own row. Decoding requests (one new
token each) attend over all rows up to the last in use as they lie, without a gather; prompts being computed
bring several tokens and are padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollwright.engine.embedded.kv import KV, Index


@dataclass(frozen=True)
class Plan:
    """Tokens of one step: first one for each decoding row, then the chunks of prompts."""

    rows: Index
    """int64[N]: each token's row."""
    positions: Index
    """int64[N]: each token's position in its row."""
    decoding: int
    """How many of the N decode; their rows ascend."""
    chunks: tuple[tuple[int, int, int], ...]
    """(row, start, end) of each prompt chunk, in the order of their tokens."""


class RowAttend:
    """An `Attend` for one plan of a model with `heads` query heads."""

    def __init__(self, kv: KV, plan: Plan, heads: int) -> None:
        self._kv, self._heads, self._decoding = kv, heads, plan.decoding
        self._scale = kv.head_dim**-0.5
        self._write = kv.vectors(plan.rows, plan.positions)
        if plan.decoding:
            self._plan_decoding(plan.rows[: plan.decoding], plan.positions[: plan.decoding])
        self._chunks = len(plan.chunks)
        if plan.chunks:
            self._plan_chunks(np.array(plan.chunks, np.int64))

    def _plan_decoding(self, rows: Index, positions: Index) -> None:
        self._top, self._seen = int(rows[-1]) + 1, int(positions.max()) + 1
        self._dense = self._top == len(rows)
        self._rows = torch.from_numpy(rows)
        last, spread = np.zeros(
            (2, self._top), np.int64
        )  # a row that doesn't decode computes something unused
        last[rows], spread[rows] = positions, np.arange(len(rows))
        self._spread = torch.from_numpy(spread)
        hidden = np.arange(self._seen) > last[:, None]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        self._mask = torch.from_numpy(np.repeat(mask, self._kv.kv_heads, 0)).unsqueeze(1)

    def _plan_chunks(self, chunks: Index) -> None:
        rows, start, end = chunks.T
        count, kv = end - start, self._kv
        self._longest, self._reach = int(count.max()), int(end.max())
        self._chunk_rows = torch.from_numpy(rows.copy())
        steps = np.arange(self._longest)
        real = steps < count[:, None]
        self._place = torch.from_numpy(np.flatnonzero(real))
        self._pad = torch.from_numpy(np.where(real, np.cumsum(real).reshape(real.shape) - 1, 0).reshape(-1))
        hidden = np.arange(self._reach) > (start[:, None] + steps)[:, :, None]
        mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        groups = (-1, kv.kv_heads, self._heads // kv.kv_heads, -1, -1)
        self._chunk_mask = (
            mask[:, None, None].expand(groups).reshape(len(rows) * kv.kv_heads, -1, self._reach)
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._kv.layers[layer].index_copy_(0, self._write, torch.cat((k, v)).view(-1, self._kv.head_dim))
        if not self._chunks:
            return self._decode(layer, q)
        if not self._decoding:
            return self._prefill(layer, q)
        return torch.cat(
            (self._decode(layer, q[: self._decoding]), self._prefill(layer, q[self._decoding :]))
        )

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        kv, heads = self._kv, self._heads
        if not self._dense:
            q = q.index_select(0, self._spread)
        grouped = q.reshape(self._top * kv.kv_heads, -1, kv.head_dim)
        keys, values = (kv.rows[layer, i, : self._top].flatten(0, 1)[:, : self._seen] for i in range(2))
        scores = torch.baddbmm(self._mask, grouped, keys.transpose(1, 2), alpha=self._scale)
        seen = torch.bmm(scores.softmax(-1), values).view(self._top, heads, kv.head_dim)
        return seen if self._dense else seen.index_select(0, self._rows)

    def _prefill(self, layer: int, q: Tensor) -> Tensor:
        kv, m, longest = self._kv, self._chunks, self._longest
        # [chunk, token, kv head, query head of it, head_dim] → queries of one KV head side by side
        padded = q.index_select(0, self._pad).view(m, longest, kv.kv_heads, -1, kv.head_dim)
        grouped = padded.permute(0, 2, 3, 1, 4)
        keys, values = (
            kv.rows[layer, i, :, :, : self._reach].index_select(0, self._chunk_rows).flatten(0, 1)
            for i in range(2)
        )
        queries = grouped.reshape(m * kv.kv_heads, -1, kv.head_dim)
        scores = torch.baddbmm(self._chunk_mask, queries, keys.transpose(1, 2), alpha=self._scale)
        seen = torch.bmm(scores.softmax(-1), values).view(grouped.shape).permute(0, 3, 1, 2, 4)
        return seen.reshape(m * longest, self._heads, kv.head_dim).index_select(0, self._place)
