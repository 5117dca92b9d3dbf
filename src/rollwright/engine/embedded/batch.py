"""The running requests as arrays: one row each, lowest rows first.

Role: lets a step work on all requests at once instead of one by one. Neighbours: the scheduler fills and
empties rows, `step` reads them. Invariants: a row is active exactly where its length is above 0; `computed`
< `length`: the last known token's KV is always still to be computed, for its output is what the next token
is drawn from.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from rollwright.engine.embedded.kv import KV, Index
from rollwright.engine.embedded.radix import Node
from rollwright.engine.embedded.request import Request

_ROW = np.dtype(
    [
        ("length", np.int64),
        ("computed", np.int64),
        ("base", np.int64),
        ("prompt", np.int64),
        ("limit", np.int64),
        ("order", np.int64),
        ("priority", np.int64),
        ("noise", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("min_p", np.float32),
        ("last", np.float64),
        ("watched", np.bool_),
    ]
)


class Batch:
    """Up to `rows` requests of up to `context` tokens."""

    def __init__(self, rows: int, context: int) -> None:
        self._table = np.zeros(rows, _ROW)
        self.length: Index = self._table["length"]
        """Tokens known: prompt and sampled."""
        self.computed: Index = self._table["computed"]
        """Tokens whose KV is there."""
        self.base: Index = self._table["base"]
        """Tokens whose KV is not in the row but on the path to its node."""
        self.limit: Index = self._table["limit"]
        self.order: Index = self._table["order"]
        """Counts admissions: who came first."""
        self.priority: Index = self._table["priority"]
        self.noise: npt.NDArray[np.uint64] = self._table["noise"]
        self.temperature: npt.NDArray[np.float32] = self._table["temperature"]
        self.top_p: npt.NDArray[np.float32] = self._table["top_p"]
        self.top_k: Index = self._table["top_k"]
        self.min_p: npt.NDArray[np.float32] = self._table["min_p"]
        self.last: npt.NDArray[np.float64] = self._table["last"]
        """When the row's last token came, in seconds; nan before its first."""
        self.watched: npt.NDArray[np.bool_] = self._table["watched"]
        """Whether each token of it must be looked at: streams, stop strings, constraints."""
        self.tokens = np.zeros((rows, min(context, 512)), np.int32)
        self.logprobs = np.zeros(self.tokens.shape, np.float32)
        """Behaviour logprobs, at the position of their token."""
        self.stops = np.full((rows, 1), -1, np.int64)
        """Stop ids of each row, filled up with -1."""
        self.requests: list[Request | None] = [None] * rows
        self.nodes: list[Node | None] = [None] * rows
        """The locked node whose path each row reads in place."""
        self.changes = 0
        """Counts rows that were filled, emptied or moved, or whose base was."""
        self._context = context
        self._free = list(range(rows))
        self._admitted = 0

    def __len__(self) -> int:
        return len(self.requests) - len(self._free)

    @property
    def full(self) -> bool:
        """No row is free."""
        return not self._free

    @property
    def next_row(self) -> int:
        """The row that `add` would take."""
        return self._free[0]

    def active(self) -> Index:
        """Rows in use, ascending."""
        return np.flatnonzero(self.length)

    def add(self, request: Request, computed: int, base: int, node: Node | None) -> int:
        """Put `request` into the lowest free row, `computed` of whose tokens have their KV, `base` of them on
        the path to `node`; gives the row."""
        row, sampling = heapq.heappop(self._free), request.sampling
        length, stops = len(request.tokens), sampling.stop
        self._admitted += 1
        self.changes += 1
        self._table[row] = (
            length,
            computed,
            base,
            request.prompt,
            request.limit,
            self._admitted,
            request.priority,
            request.noise,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            np.nan,
            request.watched,
        )
        self._widen(request.limit)
        self.tokens[row, :length] = request.tokens
        self.logprobs[row, request.prompt : length] = request.logprobs
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.requests), len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        self.requests[row], self.nodes[row] = request, node
        return row

    def _widen(self, tokens: int) -> None:
        """Make rows of ids long enough for `tokens`; memory follows what is asked for, not the context."""
        width = self.tokens.shape[1]
        if tokens > width:
            more = ((0, 0), (0, min(self._context, max(tokens, 2 * width)) - width))
            self.tokens, self.logprobs = np.pad(self.tokens, more), np.pad(self.logprobs, more)

    def take(self, row: int) -> Request:
        """Empty a row; the request gets its tokens and logprobs back."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        length = int(self.length[row])
        request.tokens = self.tokens[row, :length].copy()
        request.logprobs = self.logprobs[row, request.prompt : length].copy()
        self.requests[row] = self.nodes[row] = None
        self.changes += 1
        self.length[row] = 0
        heapq.heappush(self._free, row)
        return request

    def key(self, row: int, tokens: int) -> bytes:
        """The row's first `tokens` ids as a radix key."""
        return self.tokens[row, :tokens].tobytes()

    def compact(self, kv: KV) -> None:
        """Move the last rows into holes where holes are many: attention runs over all rows up to the last
        one in use."""
        active = self.active()
        holes = (int(active[-1]) + 1 - len(active)) if len(active) else 0
        if holes <= max(2, len(active) // 4):
            return
        for source in active[::-1].tolist():
            target = self._free[0]
            if target > source:
                return
            heapq.heapreplace(self._free, source)
            self.changes += 1
            kv.move(source, target, int(self.computed[source] - self.base[source]))
            for array in (self._table, self.tokens, self.logprobs, self.stops):
                array[target] = array[source]
            self.length[source] = 0
            for held in (self.requests, self.nodes):
                held[target], held[source] = held[source], None
