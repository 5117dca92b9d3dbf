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
from rollwright.engine.embedded.request import Request

_ROW = np.dtype(
    [
        ("length", np.int64),
        ("computed", np.int64),
        ("prompt", np.int64),
        ("limit", np.int64),
        ("order", np.int64),
        ("noise", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("streams", np.bool_),
    ]
)


class Batch:
    """Up to `rows` requests of up to `context` tokens."""

    def __init__(self, rows: int, context: int) -> None:
        self._table = np.zeros(rows, _ROW)
        self.length: Index = self._table["length"]
        """Tokens known: prompt and sampled."""
        self.computed: Index = self._table["computed"]
        """Tokens whose KV is in the row."""
        self.limit: Index = self._table["limit"]
        self.order: Index = self._table["order"]
        """Counts admissions: who came first."""
        self.noise: npt.NDArray[np.uint64] = self._table["noise"]
        self.temperature: npt.NDArray[np.float32] = self._table["temperature"]
        self.top_p: npt.NDArray[np.float32] = self._table["top_p"]
        self.streams: npt.NDArray[np.bool_] = self._table["streams"]
        self.tokens = np.zeros((rows, context), np.int32)
        self.logprobs = np.zeros((rows, context), np.float32)
        """Behaviour logprobs, at the position of their token."""
        self.stops = np.full((rows, 1), -1, np.int64)
        """Stop ids of each row, filled up with -1."""
        self.requests: list[Request | None] = [None] * rows
        self._free = list(range(rows))
        self._admitted = 0

    def __len__(self) -> int:
        return len(self.requests) - len(self._free)

    @property
    def full(self) -> bool:
        """No row is free."""
        return not self._free

    def active(self) -> Index:
        """Rows in use, ascending."""
        return np.flatnonzero(self.length)

    def add(self, request: Request, computed: int) -> int:
        """Put `request` into the lowest free row, `computed` of whose tokens have their KV; gives the row."""
        row, sampling = heapq.heappop(self._free), request.sampling
        length, stops = len(request.tokens), sampling.stop
        self._admitted += 1
        self._table[row] = (
            length,
            computed,
            request.prompt,
            request.limit,
            self._admitted,
            request.noise,
            sampling.temperature,
            sampling.top_p,
            request.sink is not None,
        )
        self.tokens[row, :length] = request.tokens
        self.logprobs[row, request.prompt : length] = request.logprobs
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.requests), len(stops)), -1, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        self.requests[row] = request
        return row

    def take(self, row: int) -> Request:
        """Empty a row; the request gets its tokens and logprobs back."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        length = int(self.length[row])
        request.tokens = self.tokens[row, :length].copy()
        request.logprobs = self.logprobs[row, request.prompt : length].copy()
        self.requests[row] = None
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
        for source in active[::-1]:
            target = self._free[0]
            if target > source:
                return
            heapq.heapreplace(self._free, int(source))
            kv.move(int(source), target, int(self.computed[source]))
            for array in (self._table, self.tokens, self.logprobs, self.stops):
                array[target] = array[source]
            self.length[source] = 0
            self.requests[target], self.requests[source] = self.requests[source], None
