"""Text that ordinary tokens must not spell: the marks around calls.

Role: keeps `<call>` and `</call>` for the control tokens that mean them, so that the text of a turn parses
into the calls that were meant. Neighbours: `guided` clears what `forbidden` names. Invariant: no sequence of
text tokens that it lets through spells a mark.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollwright.engine.grammar.table import Table


class Marks:
    """Marks of one vocabulary, and the tokens that would end one after a given text."""

    def __init__(self, table: Table, marks: tuple[bytes, ...]) -> None:
        self._table = table
        self._marks = marks
        self.keep = max(map(len, marks)) - 1
        """Bytes of the text before that decide."""
        self._whole = np.unique(np.concatenate([table.containing(mark) for mark in marks]))
        self._found: dict[bytes, npt.NDArray[np.int64]] = {}

    def forbidden(self, tail: bytes) -> npt.NDArray[np.int64]:
        """Ids of the tokens that spell a mark after `tail`, the last `keep` bytes of text."""
        at = tail.rfind(b"<")  # marks have one "<", their first character
        if at < 0:
            return self._whole
        open = tail[at:]
        if not any(mark.startswith(open) for mark in self._marks):
            return self._whole
        if open not in self._found:  # as many as marks have prefixes
            rests = [mark[len(open) :] for mark in self._marks if mark.startswith(open)]
            ids = [self._whole, *(self._table.beginning(rest) for rest in rests if rest)]
            self._found[open] = np.unique(np.concatenate(ids))
        return self._found[open]
