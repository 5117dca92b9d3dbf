"""Decoding when nothing comes or goes: the same operations again, on buffers and views that are all there.

Role: the forward of a step in which every row in use decodes one token, which most steps of most runs are.
Neighbours: `step` calls it instead of `Folded.forward` with a `StepAttend`, `kv` holds the rows. Invariant:
what it computes and writes is what those two would, up to rounding.

On a CPU a small model's step costs as much for making views and small tensors as for computing. So each
operation is bound once to its arguments; between steps only numbers change, in arrays that the tensors share
their memory with. Attention runs over places in steps, hidden ones masked, so that views last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rollwright.engine.embedded.kv import KV, Index
from rollwright.engine.embedded.partial import partial as attention
from rollwright.engine.embedded.plan import Plan
from rollwright.engine.embedded.radix import Views
from rollwright.model.folded import Folded, Layer

STRIDE, LEAST, MOST = 512, 8, 128
"""Views reach up to STRIDE / rows places beyond the last, within these bounds: making them costs the same for
any number of rows, computing with more places than are needed does not."""

Read = tuple[Views, Index]
"""Keys and values of each layer, and int64[n] the rows that read them in place."""

_silu = torch._C._nn.silu  # without the checks of `functional.silu`


class Replay:
    """Decodes the first `rows` rows of `kv` with `model`."""

    def __init__(self, model: Folded, kv: KV, rows: int, levels: Sequence[Sequence[Read]] = ()) -> None:
        shape = model.shape
        self.rows, self._model, self._kv, self._shape = rows, model, kv, shape
        self._levels = levels
        self._table: Tensor | None = None
        self._weights: object = None
        self._seen = 0
        self._stride = min(max(STRIDE // rows, LEAST), MOST)
        self._calls: list[Callable[[], object]] = []
        self._ids, self._positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._write = np.zeros((2, rows, shape.kv_heads), np.int64)
        self._row = np.arange(rows)
        self._mask = np.zeros((rows, shape.kv_heads, 0), np.float32)

    def logits(self, ids: Index, positions: Index, places: Index, again: bool = False) -> Tensor:
        """float32[n, V], valid until the next call, for int64[n] ids at these positions of their histories
        and places of their rows; `again` says that the call before was the same, a token earlier."""
        kv, most = self._kv, int(places.max()) + 1
        seen = min(-(-most // self._stride) * self._stride, kv.places)
        if (
            seen > self._seen
            or 2 * seen <= self._seen
            or kv.table is not self._table
            or self._model.layers is not self._weights
        ):
            self._build(seen)
            self._hide(places)
        elif again:
            self._mask[self._row, :, places] = 0
        else:
            self._hide(places)
        self._ids[:], self._positions[:] = ids, positions
        np.add(self._base, places[:, None], out=self._write)
        for call in self._calls:
            call()
        return self._logits

    def _hide(self, places: Index) -> None:
        hidden = np.arange(self._seen) > places[:, None]
        self._mask[:] = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None]

    def _build(self, seen: int) -> None:
        """Bind every operation to its buffers."""
        kv, model, rows, shape = self._kv, self._model, self.rows, self._shape
        self._seen, self._table, self._weights = seen, kv.table, model.layers
        self._base = kv.bases(self._row)
        self._mask = np.zeros((rows, shape.kv_heads, seen), np.float32)
        dim, half = model.embed.shape[1], shape.head_dim // 2
        self._x, self._normed, self._rms = (torch.empty(rows, size) for size in (dim, dim, 1))
        turn = torch.empty(rows, 1, half, dtype=torch.complex64)
        ids, positions = torch.from_numpy(self._ids), torch.from_numpy(self._positions)
        self._calls = calls = []
        calls.append(partial(torch.index_select, model.embed, 0, ids, out=self._x))
        calls.append(partial(torch.index_select, model.turn, 0, positions, out=turn))
        for number, layer in enumerate(model.layers):
            self._norm()
            self._attend(number, layer, turn)
            self._norm()
            self._feed(layer)
        self._norm()
        self._logits = torch.empty(rows, model.head.shape[1])
        calls.append(partial(torch.mm, self._normed, model.head, out=self._logits))

    def _norm(self) -> None:
        x, y, rms, model = self._x, self._normed, self._rms, self._model
        self._calls += [
            partial(torch.mul, x, x, out=y),
            partial(torch.addmm, model.eps, y, model.mean, out=rms),
            rms.rsqrt_,
            partial(torch.mul, x, rms, out=y),
        ]

    def _attend(self, number: int, layer: Layer, turn: Tensor) -> None:
        kv, rows, shape = self._kv, self.rows, self._shape
        heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
        qkv = torch.empty(rows, heads + 2 * kv_heads, size)
        flat, pairs = qkv.view(rows, -1), torch.view_as_complex(qkv.view(rows, -1, size // 2, 2))
        q, new = torch.empty(rows, heads, size), torch.empty(2, rows, kv_heads, size)
        turned, keys = (torch.view_as_complex(x.view(rows, -1, size // 2, 2)) for x in (q, new[0]))
        queries = q.view(rows * kv_heads, -1, size)
        wide, mask = rows * kv_heads, torch.from_numpy(self._mask).view(rows * kv_heads, 1, -1)
        scores, found = torch.empty(wide, queries.shape[1], self._seen), torch.empty_like(queries)
        write = torch.from_numpy(self._write).view(-1)
        if layer.bias is None:
            project = partial(torch.mm, self._normed, layer.qkv, out=flat)
        else:
            project = partial(torch.addmm, layer.bias, self._normed, layer.qkv, out=flat)
        self._calls += [
            project,
            partial(torch.mul, pairs[:, :heads], turn, out=turned),
            partial(torch.mul, pairs[:, heads : heads + kv_heads], turn, out=keys),
            partial(new[1].copy_, qkv[:, heads + kv_heads :]),
            partial(kv.layers[number].index_copy_, 0, write, new.view(-1, size)),
            partial(torch.baddbmm, mask, queries, kv.keys[number][:wide, :, : self._seen], out=scores),
        ]
        weight = torch.empty(rows, kv_heads, heads // kv_heads)
        if self._levels:
            top, share = torch.empty(scores.shape[:2]), torch.empty(scores.shape[:2])
            self._calls += [  # the log of the sum, see `attend`
                partial(torch.amax, scores, -1, out=top),
                partial(torch.softmax, scores, -1, out=scores),
                partial(torch.amax, scores, -1, out=share),
                share.log_,
                partial(torch.sub, top, share, out=weight.view(top.shape)),
            ]
        else:
            self._calls.append(partial(torch.softmax, scores, -1, out=scores))
        self._calls.append(partial(torch.bmm, scores, kv.values[number][:wide, : self._seen], out=found))
        for level in self._levels:
            self._join(number, level, q, found.view(*weight.shape, size), weight)
        self._calls.append(partial(self._x.addmm_, found.view(rows, -1), layer.out))

    def _join(self, number: int, level: Sequence[Read], q: Tensor, found: Tensor, weight: Tensor) -> None:
        """Add what the rows of `level` read in place to what they `found`."""
        _, kv_heads, groups, size = found.shape
        at = torch.from_numpy(np.concatenate([rows for _, rows in level]))
        picked, grouped = torch.empty(len(at), *found.shape[1:]), torch.empty(kv_heads, len(at), groups, size)
        there, logs = torch.empty(len(at), kv_heads, groups, size), torch.empty(len(at), kv_heads, groups)
        self._calls += [
            partial(torch.index_select, q.view(found.shape), 0, at, out=picked),
            partial(grouped.copy_, picked.transpose(0, 1)),
        ]
        first = 0
        for views, rows in level:
            last = first + len(rows)
            out, log = there[first:last].transpose(0, 1), logs[first:last].transpose(0, 1)
            self._calls.append(partial(_read, grouped[:, first:last], *views[number], out, log))
            first = last
        self._calls.append(partial(_join, found, weight, at, there, logs))

    def _feed(self, layer: Layer) -> None:
        both = torch.empty(self.rows, layer.gate_up.shape[1])
        gate, up = both.chunk(2, 1)
        wide = torch.empty(self.rows, layer.down.shape[0])
        self._calls += [
            partial(torch.mm, self._normed, layer.gate_up, out=both),
            partial(_silu, gate, out=wide),  # type: ignore[call-arg]
            partial(wide.mul_, up),
            partial(self._x.addmm_, wide, layer.down),
        ]


def shared(plan: Plan) -> list[list[Read]]:
    """What the rows of `plan` read in place."""
    return [[(segment.views, plan.rows[segment.tokens]) for segment in level] for level in plan.levels]


def _read(queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, log: Tensor) -> None:
    """Attention of queries[kv_heads, n, groups, D] into `out` of that shape and `log` without its last."""
    flat = queries.reshape(1, queries.shape[0], -1, queries.shape[3])
    found, weight = attention(flat, keys, values, 1.0)
    out.copy_(found.reshape(out.shape))
    log.copy_(weight.reshape(log.shape))


def _join(found: Tensor, weight: Tensor, at: Tensor, there: Tensor, logs: Tensor) -> None:
    """Put the parts `there` of rows `at` together with what these have found, by their weights."""
    mine = weight.index_select(0, at)
    share = torch.sigmoid(logs - mine).unsqueeze_(-1)
    found.index_copy_(0, at, found.index_select(0, at).lerp_(there, share))
    weight.index_copy_(0, at, torch.logaddexp(mine, logs))
