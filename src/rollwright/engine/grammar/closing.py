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


_FEW = 16
"""Most choices of which each is looked at."""


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
        self._marks = np.array([first < 0 for first in firsts])
        self._quote = firsts.index(ord('"')) if ord('"') in firsts else -1
        self._word, self._shift = self._ids // bits.WORD, (self._ids % bits.WORD).astype(np.uint32)
        self._buffer = bits.empty(table.size + 1)
        self._at = self._buffer.ctypes.data

    def find(self, parser: LLMatcher, limit: int, thorough: bool = True) -> list[int] | None:
        """At most `limit` tokens that make the word whole; None where no such way was found. `parser` stays
        where it is. `thorough` looks, where the first way is too long, where each choice on it leads."""
        found = self._walk(parser, limit, ahead=False)
        return self._walk(parser, limit, ahead=True) if found is None and thorough else found

    def _walk(self, parser: LLMatcher, limit: int, ahead: bool) -> list[int] | None:
        """As `find`; `ahead` looks where each of a few choices leads before it takes the shortest."""
        parser = parser.deep_copy()
        found: list[int] = []
        seen: dict[bytes, int] = {}
        while not parser.is_accepting():
            if parser.is_error() or len(found) >= limit:
                return None
            chosen = self._table.spelled(parser.compute_ff_bytes())
            if not chosen:
                choices = self._choices(parser, seen)
                if ahead and 1 < len(choices) <= _FEW:
                    choices = self._best(parser, choices, limit - len(found))
                chosen = choices[:1]
            if not chosen or not parser.consume_tokens(chosen):
                return None
            found += chosen
        return found if len(found) <= limit else None

    def _best(self, parser: LLMatcher, choices: list[int], limit: int) -> list[int]:
        """That of a few choices after which a plain walk is shortest; all of them where none ends."""
        best, least = choices, limit
        for token in choices:
            after = parser.deep_copy()
            rest = self._walk(after, least - 1, ahead=False) if after.consume_token(token) else None
            if rest is not None and len(rest) < least:
                best, least = [token], len(rest)
        return best

    def _choices(self, parser: LLMatcher, seen: dict[bytes, int]) -> list[int]:
        """Tokens for where `parser` stands, the one to try first in front; none where nothing is allowed."""
        parser.unsafe_compute_mask_ptr(self._at, self._buffer.nbytes)
        open = (self._buffer[self._word] >> self._shift) & np.uint32(1)
        places = np.flatnonzero(open)
        if not len(places):
            return bits.tokens(self._buffer, self._table.size)[:1]
        if self._quote >= 0 and open[self._quote] and open[self._content].all():
            # Inside a string, where brackets are content; where a control token may come it is plain text,
            # where quotes are content too.
            ends = self._ids[open.astype(bool) & self._marks]
            return ends.tolist() if len(ends) else [int(self._ids[self._quote])]
        key = open.tobytes()
        turn = seen[key] = (seen.get(key, -1) + 1) % len(places)
        ids: list[int] = self._ids[places].tolist()
        return ids[turn:] + ids[:turn]
