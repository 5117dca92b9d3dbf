"""A request that looks for a replica which answers.

Role: whom it has asked. Neighbours: `replicas` chooses whom it asks next. Invariant: one that failed it is
not asked again, one that was only full is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollwright.engine.serve.desk import Busy
from rollwright.types import Completion, Finish

BUSY_SECONDS = 30.0
"""How long a request is tried again where every replica has as many as it takes."""
AGAIN_SECONDS = 0.25


@dataclass(eq=False)
class Search:
    """A request on its way to a replica that answers."""

    until: float
    """When it stops to ask those that are full."""
    tried: set[int] = field(default_factory=set)
    full: Busy | None = None
    """What the last one said that had no place; those are asked again."""
    turned: set[int] = field(default_factory=set)
    """Those that had none."""
    aborted: bool = False

    def turned_away(self, number: int, error: Busy) -> None:
        """Replica `number` has no place."""
        self.full = error
        self.turned.add(number)

    def again(self) -> None:
        """Those that had no place may have one now."""
        self.tried -= self.turned
        self.turned.clear()
        self.full = None


def nothing(request: str, prompt: int) -> Completion:
    """The answer to a request of `prompt` tokens that was aborted before anyone took it."""
    return Completion(
        request=request,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        spans=(),
        finish=Finish.ABORT,
        prompt_tokens=prompt,
    )
