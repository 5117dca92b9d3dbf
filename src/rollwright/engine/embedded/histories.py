"""Where each history's KV lies: its end in a row, what is before it in the tree, nothing twice.

Role: moves KV between the two as requests come, grow and go. Neighbours: the scheduler says when; `batch`,
`kv` and `radix` hold it. Invariants: a running request's path is locked; a prefix that several read is read
in place, one that a single request goes on from is moved into its row and back; only pieces too short to be
worth an attention call of their own are copied.
"""

from __future__ import annotations

from functools import partial

import torch

from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.batch import Batch
from rollwright.engine.embedded.kv import KV
from rollwright.engine.embedded.radix import TOKEN, Node, Radix
from rollwright.engine.embedded.request import Request
from rollwright.model.base import Shape
from rollwright.types import PolicyVersion

SHARE = 64
"""Shortest piece of a prefix, in tokens, that is read in place; shorter ones are copied into the row."""


SPARE = 8
"""Most tokens at the end of a resting history that are forgotten so that the rest can be taken whole."""


class Histories:
    """The KV of everything that runs or rests."""

    def __init__(
        self,
        shape: Shape,
        config: EmbeddedConfig,
        version: PolicyVersion,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.version = version
        self.row_tokens = min(config.row_tokens, shape.context)
        self.batch = Batch(config.max_batch, shape.context)
        self.kv = KV(shape, device, dtype)
        self.radix = Radix(
            config.kv_tokens, config.host_tokens, _to_host, partial(torch.Tensor.to, device=device, copy=True)
        )
        self._token_bytes = shape.kv_values * torch.empty((), dtype=dtype).element_size()

    @property
    def tokens(self) -> int:
        """Tokens whose KV is held on the device."""
        active = self.batch.active()
        return self.radix.tokens + int((self.batch.computed[active] - self.batch.base[active]).sum())

    @property
    def bytes(self) -> int:
        """Bytes allocated on the device."""
        return self.kv.bytes + self.radix.tokens * self._token_bytes

    def reserve(self, rows: int, places: int) -> None:
        """Make room for `rows` rows of `places` tokens."""
        if rows > self.kv.rows or places > self.kv.places:
            self.kv.reserve(rows, places, self._used())

    def _used(self) -> int:
        """Rows up to the last in use."""
        active = self.batch.active()
        return int(active[-1]) + 1 if len(active) else 0

    def match(self, request: Request) -> tuple[Node, int]:
        """The last node and the tokens of the longest prefix found for `request`. One token is left out: its
        output is what the next one is drawn from."""
        return self.radix.match(self.version, request.tokens[:-1].tobytes())

    def admit(self, request: Request, alone: bool) -> int | None:
        """Give `request` a row and what is cached of it; the row, or None where the rest of it would not fit
        beside what is locked. `alone`: nobody else is about to read what it goes on from."""
        radix, batch = self.radix, self.batch
        ends, matched = self.match(request)
        if alone and ends.start < matched < ends.end <= matched + SPARE and not (ends.children or ends.locks):
            radix.trim(ends, matched - ends.start)  # a cut would leave it to be read in place
        found = radix.reach(self.version, request.tokens[:-1].tobytes())
        copied, node = [], found
        while node.parent is not None:
            own = node is found and alone and not node.children and not node.locks
            if not (own or len(node) < SHARE) or found.end - node.start > self.row_tokens // 2:
                break
            copied.append(node)
            node = node.parent
        locked = radix.locked + sum(len(each) for each in node.up() if not each.locks)
        spill = len(request.tokens) - node.end - self.row_tokens
        if len(batch) and locked + max(0, spill) > radix.capacity:
            return None
        radix.lock(node)
        held = node if node.parent is not None else None
        self.reserve(batch.next_row + 1, found.end - node.end)
        row = batch.add(request, found.end, node.end, held)
        self.kv.load(row, [each.block for each in reversed(copied) if each.block is not None])
        if copied and copied[0] is found and alone and not found.children and not found.locks:
            radix.take(found)
        return row

    def publish(self, row: int, tokens: int) -> bool:
        """Move the row's KV up to its first `tokens` into the tree, where others find it; whether there was
        room."""
        batch, base = self.batch, int(self.batch.base[row])
        if tokens <= base:
            return True
        if not self.radix.room(tokens - base):
            return False
        node = self.radix.insert(self.version, batch.key(row, tokens), partial(self._read, row, base))
        if node.end != tokens:
            return False
        self.radix.lock(node)
        self.radix.unlock(batch.nodes[row])
        self.kv.shift(row, tokens - base, int(batch.computed[row]) - base)
        batch.nodes[row], batch.base[row] = node, tokens
        batch.changes += 1
        self._join(node)
        return True

    def _join(self, node: Node) -> None:
        """Put pieces of a history together that a single request reads, as long as they are of like size:
        each is a call of its own in every step, and a token is copied only as often as its piece doubles."""
        above = node.parent
        while (
            above is not None
            and above.parent is not None
            and len(above.children) == 1
            and above.locks == node.locks
            and len(above) <= 2 * len(node)
        ):
            self.radix.join(node)
            above = node.parent

    def leave(self, row: int) -> Request:
        """Empty a row; what it computed rests in the tree."""
        batch = self.batch
        base, computed = int(batch.base[row]), int(batch.computed[row])
        if computed > base:
            self.radix.insert(self.version, batch.key(row, computed), partial(self._read, row, base))
        self.radix.unlock(batch.nodes[row])
        return batch.take(row)

    def forget(self, version: PolicyVersion) -> list[Request]:
        """The weights changed: no KV is of use. Gives the requests that ran, oldest first."""
        batch = self.batch
        rows = batch.active()
        running = []
        for row in rows[batch.order[rows].argsort()].tolist():
            self.radix.unlock(batch.nodes[row])
            running.append(batch.take(row))
        self.radix.clear()
        self.kv.shrink(0, 0)  # what broken weights left there would be multiplied with 0, which heals no nan
        self.version = version
        return running

    def compact(self) -> None:
        """Close holes between rows, and give memory back where much is unused."""
        batch = self.batch
        batch.compact(self.kv)
        active = batch.active()
        self.kv.shrink(self._used(), int((batch.length[active] - batch.base[active]).max(initial=0)))

    def _read(self, row: int, base: int, start: int, end: int) -> torch.Tensor:
        return self.kv.read(row, start - base, end - base)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where rows, paths and tree disagree."""
        self.radix.check_integrity()
        batch, radix = self.batch, self.radix
        active = set(batch.active().tolist())
        assert active == {i for i, r in enumerate(batch.requests) if r is not None}, "rows and requests"
        assert len(active) == len(batch), "free rows"
        wanted: dict[Node, int] = {}
        for row in active:
            assert batch.base[row] <= batch.computed[row] < batch.length[row], f"row {row} is out of step"
            node = batch.nodes[row]
            assert (node.end if node else 0) == batch.base[row], (
                f"row {row} begins elsewhere than its path ends"
            )
            if node is not None:
                path = b"".join(each.key for each in reversed(list(node.up())))
                assert path == batch.key(row, node.end), f"row {row} reads another history"
            for each in node.up() if node else ():
                wanted[each] = wanted.get(each, 0) + 1
        assert all(each.locks == count for each, count in wanted.items()), "locks and readers"
        assert sum(map(len, wanted)) == radix.locked, "something is locked that nobody reads"
        assert batch.tokens.itemsize == TOKEN, "keys are raw ids"


def _to_host(block: torch.Tensor) -> torch.Tensor:
    """A copy in host memory."""
    return block.to("cpu", copy=True)
