"""Token ids into pieces of text that can be shown at once.

Role: what a text stream sends while the engine still samples. Neighbours: the server's text endpoint pushes
ids as they come. Invariants: the pieces put together are the whole text up to its first stop string, however
the ids came in; a piece never ends inside a character, nor with the beginning of a stop string that the next
id may complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence


def spelt(pieces: Sequence[bytes], id: int) -> bytes:
    """The bytes of `id`; none for one beyond `pieces`: a model may have more ids than its tokenizer, to fill
    up a round size, and may sample one of them."""
    return pieces[id] if id < len(pieces) else b""


class TextStream:
    """Text of one completion, as it grows.

    `pieces` are the bytes of each id; ids in `hidden` (control tokens) give no text. Bytes that are no UTF-8
    become U+FFFD, as `bytes.decode("utf-8", "replace")` has it. `stop` are the stop strings, none empty.
    """

    def __init__(
        self, pieces: Sequence[bytes], hidden: Collection[int] = (), stop: Iterable[str] = ()
    ) -> None:
        self._pieces, self._hidden = pieces, hidden
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False
        """Whether a stop string was found; nothing more comes."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now."""
        data = b"".join(spelt(self._pieces, id) for id in ids if id not in self._hidden)
        return self._scan(self._decoder.decode(data))

    def end(self) -> str:
        """What was held back; the completion is over."""
        text = self._scan(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _scan(self, text: str) -> str:
        """Release all of `text` that no stop string can claim.

        The first stop string is the one that is whole first; of several that are whole at once the longest.
        """
        if self.stopped:
            return ""
        if not self._stop:
            return text
        out, held = [], self._held
        for character in text:
            held += character
            if found := max((len(each) for each in self._stop if held.endswith(each)), default=0):
                out.append(held[:-found])
                self.stopped, self._held = True, ""
                return "".join(out)
            keep = self._claimed(held)
            out.append(held[: len(held) - keep])
            held = held[len(held) - keep :]
        self._held = held
        return "".join(out)

    def _claimed(self, held: str) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        longest = min(len(held), max(map(len, self._stop)) - 1)
        ends = range(longest, 0, -1)
        return next((n for n in ends if any(each.startswith(held[-n:]) for each in self._stop)), 0)
