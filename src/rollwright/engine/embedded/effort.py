"""How much work a step is, counted in tokens: what keeps a long prompt from starving those who decode.

Role: says how many prompt tokens go into a step. Neighbours: the scheduler. Invariant: counted, not measured:
the same requests give the same steps on any machine, however busy it is.

The unit is one token through the linear layers, 2 · parameters operations. A token also costs attention, 4 ·
layers · heads · head_dim operations for each token of its history; a step costs a constant for being one, and
so do a prompt beside those who decode, and each piece of its history that is read in place.
"""

from __future__ import annotations

import math

from rollwright.model.base import Shape

STEP = 24.0
"""What a step costs beside its tokens, in tokens: about 30 and 15 on one core with models of 0.9 M and 5 M
parameters."""
CHUNK = 24.0
"""What a prompt costs beside its tokens."""
PIECE = 4.0
"""What each piece of its history costs beside that."""


class Effort:
    """The cost model of a model with `parameters` weights in its blocks."""

    def __init__(self, shape: Shape, parameters: int) -> None:
        self._history = 2 * parameters / (4 * shape.layers * shape.heads * shape.head_dim)

    def decode(self, requests: int, history: int) -> float:
        """A step of `requests` tokens that see `history` tokens, all together."""
        return STEP + requests + history / self._history

    def tokens(self, allowance: float, history: int, pieces: int) -> int:
        """How many tokens of a prompt `allowance` pays for, `history` tokens in `pieces` of it computed
        already; at least 1."""
        left = allowance - CHUNK - PIECE * pieces
        if left <= 1:
            return 1
        each, half = 1 + history / self._history, 1 / (2 * self._history)
        return max(1, int((math.sqrt(each * each + 4 * half * left) - each) / (2 * half)))

    def prompt(self, tokens: int, history: int, pieces: int) -> float:
        """What they cost."""
        return CHUNK + PIECE * pieces + tokens * (1 + (history + tokens / 2) / self._history)
