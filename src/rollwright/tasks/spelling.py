"""Names of two pieces: the first letters and the rest; and new names made of such pieces.

Role: pure functions; no torch. Neighbours: `atlas` takes its pieces from here and invents names. Invariant:
the same names give the same pieces in the same order, and a tokenizer that matches the longest piece first
cuts each of them, and each invented name, in exactly the two (a name of `HEAD` letters is one piece).
"""

from __future__ import annotations

import random
from collections.abc import Iterable

HEAD = 2
"""Letters of the first piece."""


class Spelling:
    """The pieces of some names. Names begin with a capital, so no piece is both a first and a last one."""

    def __init__(self, names: Iterable[str]) -> None:
        known = sorted(set(names))
        self.heads = tuple(sorted({name[:HEAD] for name in known}))
        self.tails = tuple(sorted({name[HEAD:] for name in known} - {""}))

    def invent(self, rng: random.Random) -> str:
        """A name that is any first piece and any last one, each as likely as the others."""
        return rng.choice(self.heads) + rng.choice(self.tails)
