"""Stop strings, found as tokens come.

Role: tells the scheduler that what was sampled spells a stop string. Neighbours: each request with
`Sampling.stop_text` has one; `Vocabulary` says what tokens spell. Invariants: bytes are compared, so a
string is found however tokens cut it, within a character too, and in the middle of a token; what control
tokens are named is no text, so none of them spells a stop string, and text goes on over them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollwright.model.base import Vocabulary


class StopText:
    """Looks for `stops` in the text of one completion."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        """`stops`: at least one.

        Raises:
            ValueError: one is empty, or no text (a lone surrogate).
        """
        if not stops or not all(stops):
            raise ValueError(f"expected stop strings of at least one character, got {list(stops)}")
        self._pieces = vocabulary.pieces
        self._control = frozenset(vocabulary.control.values())
        # of two that end at the same byte the longer one is told
        self._stops = sorted(((s.encode(), s) for s in stops), key=lambda pair: -len(pair[0]))
        self._reach = len(self._stops[0][0]) - 1
        self._tail = b""  # what a stop string may have begun in

    def push(self, token: int) -> str | None:
        """The stop string that this token makes whole, the one that ends first; None where it makes none.
        After one was found the search begins anew. Time: the bytes of token and longest stop string.

        A token that the vocabulary lacks (a model may have more ids than its tokenizer) spells nothing.
        """
        if token in self._control or token >= len(self._pieces):
            return None
        text = self._tail + self._pieces[token]
        ends = ((at + len(s), name) for s, name in self._stops if (at := text.find(s)) >= 0)
        found = min(ends, key=lambda end: end[0], default=None)
        if found is not None:
            self._tail = b""
            return found[1]
        self._tail = text[-self._reach :] if self._reach else b""
        return None
