"""A vocabulary as the grammar library sees it.

Role: llguidance's tokenizer and the sets of tokens that masks are made of. Neighbours: `guided` makes one
for a vocabulary; `closing` and `marks` look tokens up in it. Invariants: control tokens are never text; the
library's end token is one of our own behind the last id, so that any ids can be stop tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollwright.engine.grammar import bits
from rollwright.errors import MissingExtra
from rollwright.model.base import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_NOT_INNOCENT = frozenset(b'{}[]",:')
_OPENERS = (b"{", b"[", b",", b":")
_REMEMBERED = 4096
_MARKED = re.compile(rb"\xff\[([0-9]+)\]")
"""A control token among bytes, as llguidance writes it."""
_END = b"\x00end"


class Table:
    """Tokens of one vocabulary by what they spell.

    Raises:
        MissingExtra: llguidance is not installed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = len(vocabulary.pieces)
        self.end = self.size
        self.pieces = vocabulary.pieces
        self.control = vocabulary.control
        controls = set(vocabulary.control.values())
        self.controls = np.array(sorted(controls), np.int64)
        ordinary = [id for id in range(self.size) if id not in controls and self.pieces[id]]
        self._sorted = sorted((self.pieces[id], id) for id in ordinary)
        self._id = dict(reversed(self._sorted))
        self._longest = [0] * 256
        for piece in self._id:
            self._longest[piece[0]] = max(self._longest[piece[0]], len(piece))
        self.openers = max((sum(map(piece.count, _OPENERS)) for piece in self._id), default=1) or 1
        """Most values that one token can begin in JSON."""
        self.innocent = bits.of(
            (id for id in ordinary if _NOT_INNOCENT.isdisjoint(self.pieces[id])), self.size
        )
        """Tokens without a character that opens or closes anything in JSON."""
        shortest: dict[int, bytes] = {}
        for piece in self._id:
            best = shortest.get(piece[0])
            if best is None or len(piece) < len(best):
                shortest[piece[0]] = piece
        self.starts = {first: self._id[piece] for first, piece in shortest.items()}
        """For each first byte the shortest token that begins with it."""
        self._spelled: dict[bytes, list[int]] = {}
        self.library = self._tokenizer()

    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise MissingExtra("a constraint on the output", "grammar") from error
        return LLTokenizer(TokenizerWrapper(_Source(self)), slices=[])

    def spelled(self, data: bytes) -> list[int]:
        """Ids whose pieces join to `data`, greedy longest match; it ends early where no token fits. A control
        token stands in what the library forces as its mark and its number."""
        found = self._spelled.get(data)
        if found is None:
            if len(self._spelled) >= _REMEMBERED:
                self._spelled.clear()
            found = self._spelled[data] = self._match(data)
        return found

    def _match(self, data: bytes) -> list[int]:
        found: list[int] = []
        at = 0
        while at < len(data):
            if marked := _MARKED.match(data, at):  # a byte that no text holds, though a token may spell it
                found.append(int(marked[1]))
                at = marked.end()
                continue
            sizes = range(min(self._longest[data[at]], len(data) - at), 0, -1)
            id = next((id for size in sizes if (id := self._id.get(data[at : at + size])) is not None), None)
            if id is None:
                break
            found.append(id)
            at += len(self.pieces[id])
        return found

    def beginning(self, prefix: bytes) -> npt.NDArray[np.int64]:
        """Ids of the text tokens that begin with `prefix`, which is not empty."""
        low = bisect_left(self._sorted, (prefix, -1))
        high = bisect_right(self._sorted, (prefix + b"\xff" * (self._longest[prefix[0]] + 1), self.size))
        return np.array([id for _, id in self._sorted[low:high]], np.int64)

    def containing(self, part: bytes) -> npt.NDArray[np.int64]:
        """Ids of the text tokens that hold `part`."""
        return np.array([id for piece, id in self._sorted if part in piece], np.int64)


class _Source:
    """What llguidance's `TokenizerWrapper` reads."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.tokens = [*table.pieces, _END]
        self.special_token_ids = [*map(int, table.controls), table.end]
        self.eos_token_id = table.end
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return self._table.spelled(text if isinstance(text, bytes) else text.encode())
