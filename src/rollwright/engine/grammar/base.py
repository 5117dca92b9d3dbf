"""The grammar seam: what the scheduler asks of a constraint while it decodes.

Role: turns a `Constraint` into a matcher that masks tokens. Neighbours: the embedded engine keeps one matcher
for each constrained request. Invariants: a token that the mask allows can be accepted; as long as the matcher
has not `ended`, some token is allowed; stop tokens are allowed exactly where the text so far is a whole word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollwright.types import Constraint

Bits = npt.NDArray[np.uint32]
"""uint32[ceil(V / 32)]: bit i % 32 of word i // 32 is token i."""


class Matcher(Protocol):
    """Where one completion stands in its constraint's language."""

    def mask(self, out: Bits) -> None:
        """Set the bits of the tokens that may come next, clear all others."""

    def accept(self, token: int) -> None:
        """`token`, which the mask allowed, was sampled."""

    @property
    def complete(self) -> bool:
        """Whether the tokens so far, a stop token aside, are a whole word."""

    @property
    def ended(self) -> bool:
        """Whether nothing more can come: a stop token was accepted, the word can't be made longer, or no
        token of this vocabulary leads on. `complete` says whether it ended well."""


class Grammars(Protocol):
    """Compiles constraints for one vocabulary, each once."""

    def matcher(self, constraint: Constraint, stop: Sequence[int], budget: int | None = None) -> Matcher:
        """A fresh matcher; `stop` are the ids that end the completion, `budget` the most tokens it can have.

        With a budget the mask also leaves out tokens after which the word could not be made whole within
        it; where that cannot be had, the word is left to end unfinished.

        Raises:
            ConstraintError: the source cannot be read, or the library cannot hold decoding to it.
        """
