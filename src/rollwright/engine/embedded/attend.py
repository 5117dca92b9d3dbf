"""How the tokens of one step see their history: rows and shared prefixes, put together.

Role: the `Attend` of a step over cached KV. Neighbours: `plan` says which token reads what; `kv` holds the
rows. Invariant: a token sees exactly the positions up to its own, each once, within its layer's window.

Attention over a history in parts is exact: each part gives its output and the log of its sum of exponents,
and two parts are put together in the proportion of those sums (the online softmax of arXiv 1805.02867;
prefixes shared in a batch: Hydragen, arXiv 2402.05099). A prefix that many tokens read in place is one matrix
product for all of them. Decoding requests attend over all rows up to the last in use as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollwright.engine.embedded.kv import KV, Index
from rollwright.engine.embedded.partial import partial
from rollwright.engine.embedded.plan import Chunk, Plan
from rollwright.engine.embedded.radix import Views

Put = Callable[[Index], Tensor]

SMALL = 1 << 15
"""Scores of one head up to which a chunk is computed in batched products and not by the fused kernel."""


@dataclass(frozen=True)
class _Read:
    """A level for one window: `tokens` int64[n] in the order of their segments."""

    tokens: Tensor
    everyone: bool
    """Whether the tokens are all of the plan's, in order."""
    parts: tuple[tuple[Views, int, int, int, Tensor | None], ...]
    """(keys and values, first position read, from and to in `tokens`, mask[n, positions] or None) of each
    segment."""


class StepAttend:
    """An `Attend` for one plan. `put` brings an index array to the device."""

    def __init__(self, kv: KV, plan: Plan, put: Put) -> None:
        shape = kv.shape
        self._kv, self._plan, self._put = kv, plan, put
        self._heads, self._scale, self._windows = shape.heads, shape.scale, shape.windows
        self._write = put(kv.vectors(plan.rows, plan.places))
        if plan.decoding:
            self._spread_rows(plan.rows[: plan.decoding])
        kinds = set(self._windows)
        self._masks = {window: self._mask(window) for window in kinds} if plan.decoding else {}
        self._reads = {window: self._levels(window) for window in kinds} if plan.levels else {}
        groups = shape.heads // shape.kv_heads
        self._small = {
            (chunk, window): self._chunk_mask(chunk, int(plan.places[first]), groups, window)
            for chunk, first in plan.firsts()
            for window in kinds
        }

    def _spread_rows(self, rows: Index) -> None:
        self._top, self._seen = int(rows[-1]) + 1, int(self._plan.places[: len(rows)].max()) + 1
        self._dense = self._top == len(rows)
        if not self._dense:
            spread = np.zeros(self._top, np.int64)  # a row that doesn't decode computes something unused
            spread[rows] = np.arange(len(rows))
            self._rows, self._spread = self._put(rows), self._put(spread)

    def _mask(self, window: int | None) -> Tensor:
        """float[top × kv_heads, 1, seen]: −inf where a decoding row doesn't see a place."""
        plan, n = self._plan, self._plan.decoding
        last = np.zeros(self._top, np.int64)
        last[plan.rows[:n]] = plan.places[:n]
        at = np.arange(self._seen)
        hidden = at > last[:, None]
        if window is not None:
            hidden |= at <= last[:, None] - window
        return self._additive(np.repeat(hidden, self._kv.kv_heads, 0)).unsqueeze(1)

    def _chunk_mask(self, chunk: Chunk, place: int, groups: int, window: int | None) -> Tensor | None:
        """float[1, groups × size, places] of a chunk whose first token has `place` in its row; None where
        that is large."""
        size = chunk.end - chunk.start
        if groups * size * (place + size) > SMALL:
            return None
        at, last = np.arange(place + size), np.arange(place, place + size)[:, None]
        hidden = at > last
        if window is not None:
            hidden |= at <= last - window
        return self._additive(np.tile(hidden, (groups, 1))).unsqueeze(0)

    def _additive(self, hidden: np.typing.NDArray[np.bool_]) -> Tensor:
        mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        return mask.to(self._kv.table)

    def _levels(self, window: int | None) -> list[_Read]:
        found = []
        for level in self._plan.levels:
            tokens, parts, first = [], [], 0
            for segment in level:
                readers, start, mask = segment.tokens, segment.start, None
                if window is not None:
                    oldest = self._plan.positions[readers] - window + 1
                    readers, oldest = readers[oldest < segment.end], oldest[oldest < segment.end]
                    if not len(readers):
                        continue
                    start = max(start, int(oldest.min()))
                    if (oldest > start).any():
                        mask = self._additive(np.arange(start, segment.end) < oldest[:, None])
                parts.append((segment.views, start - segment.start, first, first + len(readers), mask))
                tokens.append(readers)
                first += len(readers)
            if parts:
                index = np.concatenate(tokens)
                everyone = len(index) == len(self._plan.rows) and bool((np.diff(index) == 1).all())
                found.append(_Read(self._put(index), everyone, tuple(parts)))
        return found

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._kv.layers[layer].index_copy_(0, self._write, torch.cat((k, v)).view(-1, self._kv.head_dim))
        reads = self._reads.get(self._windows[layer], [])
        if not reads and not self._plan.chunks:
            return self._decode(layer, q, False)[0]
        out, weight = self._own(layer, q, bool(reads))
        for i, read in enumerate(reads):
            out, weight = self._join(layer, q, read, out, weight, i == len(reads) - 1)
        return out

    def _own(self, layer: int, q: Tensor, weigh: bool) -> tuple[Tensor, Tensor | None]:
        """What each token gathers from its own row: [N, H, D], and the logs of the sums [N, H]."""
        outs, weights, n = [], [], self._plan.decoding
        if n:
            out, weight = self._decode(layer, q[:n], weigh)
            outs.append(out)
            weights += [weight] if weight is not None else []
        for chunk in self._plan.chunks:
            size = chunk.end - chunk.start
            mask = self._small[chunk, self._windows[layer]]
            if mask is not None:
                out, weight = self._small_chunk(layer, q[n : n + size], chunk.row, mask, weigh)
            else:
                out, weight = self._chunk(layer, q[n : n + size], chunk, int(self._plan.places[n]))
            outs.append(out)
            weights += [weight] if weight is not None else []
            n += size
        if len(outs) == 1:
            return outs[0], weights[0] if weights else None
        return torch.cat(outs), torch.cat(weights) if weigh else None

    def _decode(self, layer: int, q: Tensor, weigh: bool) -> tuple[Tensor, Tensor | None]:
        kv, heads = self._kv, self._heads
        if not self._dense:
            q = q.index_select(0, self._spread)
        grouped = q.reshape(self._top * kv.kv_heads, -1, kv.head_dim)
        wide, seen = self._top * kv.kv_heads, self._seen
        keys, values = kv.keys[layer][:wide, :, :seen], kv.values[layer][:wide, :seen]
        mask = self._masks[self._windows[layer]]
        found, weight = _gather(torch.baddbmm(mask, grouped, keys, alpha=self._scale), values, weigh)
        found = found.view(self._top, heads, kv.head_dim)
        weight = weight.view(self._top, heads) if weight is not None else None
        if self._dense:
            return found, weight
        return found.index_select(0, self._rows), None if weight is None else weight[self._rows]

    def _small_chunk(
        self, layer: int, q: Tensor, row: int, mask: Tensor, weigh: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `_chunk`, in batched products: less work for the machine to begin with."""
        kv, first, last = self._kv, row * self._kv.kv_heads, (row + 1) * self._kv.kv_heads
        own, seen = q.transpose(0, 1), mask.shape[2]
        keys, values = kv.keys[layer][first:last, :, :seen], kv.values[layer][first:last, :seen]
        grouped = own.reshape(kv.kv_heads, -1, kv.head_dim)
        found, weight = _gather(torch.baddbmm(mask, grouped, keys, alpha=self._scale), values, weigh)
        out = found.view(self._heads, -1, kv.head_dim).transpose(0, 1)
        return out, None if weight is None else weight.view(self._heads, -1).transpose(0, 1)

    def _chunk(self, layer: int, q: Tensor, chunk: Chunk, place: int) -> tuple[Tensor, Tensor]:
        """A chunk whose first token has `place` in its row sees what lies before it there, and itself."""
        size, window = len(q), self._windows[layer]
        keys, values = self._kv.table[layer, :, chunk.row, :, : place + size].unsqueeze(1).unbind(0)
        own = q.transpose(0, 1).unsqueeze(0)
        if window is not None and place + size > window:
            first = max(0, place - window + 1)
            at, last = np.arange(first, place + size), np.arange(place, place + size)[:, None]
            mask = self._additive((at > last) | (at <= last - window))
            return _flat(partial(own, keys[:, :, first:], values[:, :, first:], self._scale, mask=mask))
        out, weight = _flat(partial(own, keys[:, :, place:], values[:, :, place:], self._scale, causal=True))
        if place == 0:
            return out, weight
        older = _flat(partial(own, keys[:, :, :place], values[:, :, :place], self._scale))
        return _merge(out, weight, *older)

    def _join(
        self, layer: int, q: Tensor, read: _Read, out: Tensor, weight: Tensor | None, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Add what `read` gives to what its tokens have gathered."""
        assert weight is not None, "parts are put together by their weights"
        kv = self._kv
        picked = q if read.everyone else q.index_select(0, read.tokens)
        # the queries of one KV head side by side, over all tokens: [kv_heads, n, heads of it, head_dim]
        grouped = picked.view(len(picked), kv.kv_heads, -1, kv.head_dim).transpose(0, 1).contiguous()
        outs, weights = [], []
        for views, start, first, end, mask in read.parts:
            keys, values = views[layer]
            if start:
                keys, values = keys[:, :, start:], values[:, :, start:]
            queries = grouped[:, first:end].reshape(1, kv.kv_heads, -1, kv.head_dim)
            if mask is not None:
                mask = mask.repeat_interleave(grouped.shape[2], 0)
            part, logs = partial(queries, keys, values, self._scale, mask=mask)
            outs.append(part[0])
            weights.append(logs[0])
        many = torch.cat(outs, 1) if len(outs) > 1 else outs[0]
        logs = torch.cat(weights, 1) if len(weights) > 1 else weights[0]
        shared = many.reshape(grouped.shape).transpose(0, 1).reshape(picked.shape)
        shared_weight = logs.reshape(grouped.shape[:3]).transpose(0, 1).reshape(picked.shape[:2])
        if read.everyone:
            return _merge(out, weight, shared, shared_weight, last)
        at = read.tokens
        mine = out.index_select(0, at), weight.index_select(0, at)
        joined, total = _merge(*mine, shared, shared_weight, last)
        return out.index_copy(0, at, joined), weight if last else weight.index_copy(0, at, total)


def _flat(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[1, H, n, D] and [1, H, n] → [n, H, D] and [n, H]."""
    return part[0][0].transpose(0, 1), part[1][0].transpose(0, 1)


def _gather(scores: Tensor, values: Tensor, weigh: bool) -> tuple[Tensor, Tensor | None]:
    """Softmax of scores[b, n, m] over values[b, m, D]: [b, n, D]; and, if asked, log Σ exp, [b, n].

    The likeliest key's share is exp(score) / Σ exp, and at least 1/m: reading the sum off it is exact enough
    and cheaper than summing again.
    """
    shares = scores.softmax(-1)
    out = torch.bmm(shares, values)
    return out, scores.amax(-1).sub_(shares.amax(-1).log_()) if weigh else None


def _merge(
    a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, last: bool = False
) -> tuple[Tensor, Tensor]:
    """Two parts of a softmax, [n, H, D] with the logs of their sums [n, H], as one; of the `last` two only
    what is gathered is of use."""
    share = torch.sigmoid(b_weight - a_weight).unsqueeze(-1)
    return torch.lerp(a, b, share), a_weight if last else torch.logaddexp(a_weight, b_weight)
