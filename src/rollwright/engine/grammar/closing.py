"""The shortest way to end a word, so that it is whole before the budget ends.

Role: finds tokens that lead from where a parse stands to a whole word. Neighbours: `guided` asks when a
budget runs low. Invariant: what is found was tried: the parser took each token and ended in a whole word.
It is short, not proven shortest.

A walk that at each place takes a token likely to close: the end of a string, else of an array or object,
else the shortest value. At a place with the same choices it takes the next best choice, so that it leaves
loops (`a*b`). Bytes that are forced are taken at once.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import numpy as np

from rollwright.engine.grammar import bits
from rollwright.engine.grammar.table import Table

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ORDER = b']}"0123456789[{ntf'
_LAST = b"\\, \t\r\n"
_CONTENT = frozenset((string.ascii_letters + string.digits).encode())


class Closing:
    """Finds ends in words over one vocabulary."""

    def __init__(self, table: Table) -> None:
        self._table = table
        rest = sorted(table.starts.keys() - set(_ORDER) - set(_LAST))
        order = [*_ORDER[:2], *_ORDER[2:], *rest, *_LAST]
        ids = [table.starts[byte] for byte in order if byte in table.starts]
        starts = [byte for byte in order if byte in table.starts]
        control = [int(id) for id in table.controls]
        self._ids = np.array([*ids[:2], *control, *ids[2:]], np.int64)
        firsts = [*starts[:2], *(-1 for _ in control), *starts[2:]]
        self._content = np.array([first in _CONTENT for first in firsts])
        self._quote = firsts.index(ord('"')) if ord('"') in firsts else -1
        self._word, self._shift = self._ids // bits.WORD, (self._ids % bits.WORD).astype(np.uint32)
        self._buffer = bits.empty(table.size + 1)
        self._at = self._buffer.ctypes.data

    def find(self, parser: LLMatcher, limit: int) -> list[int] | None:
        """At most `limit` tokens that make the word whole; None where the walk found no such way. `parser`
        stays where it is."""
        parser = parser.deep_copy()
        found: list[int] = []
        seen: dict[bytes, int] = {}
        while not parser.is_accepting():
            if parser.is_error() or len(found) >= limit:
                return None
            chosen = self._table.spelled(parser.compute_ff_bytes()) or self._choose(parser, seen)
            if not chosen or not parser.consume_tokens(chosen):
                return None
            found += chosen
        return found if len(found) <= limit else None

    def _choose(self, parser: LLMatcher, seen: dict[bytes, int]) -> list[int]:
        """One token for where `parser` stands; none where nothing is allowed."""
        parser.unsafe_compute_mask_ptr(self._at, self._buffer.nbytes)
        open = (self._buffer[self._word] >> self._shift) & np.uint32(1)
        places = np.flatnonzero(open)
        if not len(places):
            free = bits.tokens(self._buffer, self._table.size)
            return free[:1]
        if self._quote >= 0 and open[self._quote] and open[self._content].all():
            return [int(self._ids[self._quote])]  # inside a string: brackets are content there
        key = open.tobytes()
        turn = seen[key] = seen.get(key, -1) + 1
        return [int(self._ids[places[turn % len(places)]])]
