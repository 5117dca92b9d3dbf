"""What is left of a completion's tokens, and the way to a whole word within them.

Role: narrows masks so that a word is whole when its budget ends. Neighbours: `guided` asks it for each mask,
`closing` finds the ways. Invariant: once a way to the end was found, one that fits is known at each token;
the exception is a token that was taken to open nothing and did, which a regular expression or grammar can
bring about and JSON cannot but by a `pattern`.

How a budget is kept: while it is far, nothing is checked for as many tokens as could at most be needed. Near
it, a token is allowed where a way to the end was found after it (where only few are allowed: all of them are
tried), or where it opens and closes nothing in JSON and room is left. At the last moment only the shortest
way is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwright.engine.grammar import bits
from rollwright.engine.grammar.base import Bits
from rollwright.engine.grammar.closing import Closing
from rollwright.engine.grammar.table import Table

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ROOM = 8
"""Tokens that end an escape, a character or a literal begun by a token that opens nothing."""
_FEW = 24
"""Most tokens that are tried one by one."""


class Budget:
    """What is left of a completion's tokens, and the way to a whole word within them."""

    def __init__(self, closing: Closing, left: int, growth: int, reserve: bool) -> None:
        self._closing = closing
        self._left = left
        self._growth = growth
        self._reserve = int(reserve)
        self._way: list[int] = []
        self._fresh = False
        self._far = 0
        self._given_up = False

    def spend(self, token: int) -> None:
        """`token` was sampled."""
        self._left -= 1
        self._far -= 1
        self._fresh = self._fresh and self._way[:1] == [token]
        if self._way[:1] == [token]:
            self._way = self._way[1:]

    def narrow(self, mask: Bits, parser: LLMatcher, table: Table, stops: Bits) -> None:
        """Clear in `mask` the tokens after which the word could not be made whole in time."""
        if self._given_up or self._far > 0:
            return
        way = self._ahead(parser, table)
        slack = self._left - self._reserve - len(way)
        if self._given_up or slack < 0:
            self._given_up = True
            return
        if slack > self._growth + _ROOM:  # whatever comes now, the word can still be ended
            self._far = 1 + (slack - self._growth - _ROOM) // (1 + self._growth)
            return
        self._near(mask, parser, table, stops, slack)

    def _ahead(self, parser: LLMatcher, table: Table) -> list[int]:
        """A way to a whole word from where `parser` stands: the last one where it still leads there."""
        if not self._fresh:
            holds = parser.validate_tokens([*self._way, table.end]) == len(self._way) + 1
            room = self._left - self._reserve
            if not holds or room - len(self._way) < _ROOM:
                found = self._closing.find(parser, room, thorough=not holds)
                self._given_up = found is None and not holds
                self._way = self._way if found is None else found
            self._fresh = True
        return self._way

    def _near(self, mask: Bits, parser: LLMatcher, table: Table, stops: Bits, slack: int) -> None:
        sure = stops & mask
        if self._way and bits.has(mask, self._way[0]):
            sure[self._way[0] // bits.WORD] |= 1 << (self._way[0] % bits.WORD)
        if slack > 0:
            open = bits.tokens(mask & ~sure, table.size)
            if len(open) > _FEW:
                if slack > _ROOM:
                    sure |= mask & table.innocent
                open = [int(token) for token in table.controls if bits.has(mask, int(token))][:_FEW]
            for token in open:
                if self._in_time(parser, token):
                    sure[token // bits.WORD] |= 1 << (token % bits.WORD)
        if sure.any():
            mask &= sure
        # else the parser forces a text and leaves only one of its spellings, which is none of the way

    def _in_time(self, parser: LLMatcher, token: int) -> bool:
        """Whether a way to a whole word was found after `token`."""
        after = parser.deep_copy()
        limit = self._left - 1 - self._reserve
        return after.consume_token(token) and self._closing.find(after, limit, thorough=False) is not None
