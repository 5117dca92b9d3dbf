"""What looks at each token of a request: its stop strings and its constraint.

Role: makes them for a request, or says why not. Neighbours: `engine` asks; `stops` and `grammar` do the work.
Invariant: a request that asks for what cannot be watched is refused, never run without.
"""

from __future__ import annotations

from rollwright.engine.embedded.request import Watch
from rollwright.engine.embedded.stops import StopText
from rollwright.engine.grammar.base import Grammars
from rollwright.errors import ConstraintError
from rollwright.model.base import Vocabulary
from rollwright.types import Sampling


class Watchers:
    """For the tokens of one `vocabulary`."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._grammars: Grammars | None = None

    def of(self, sampling: Sampling, room: int) -> Watch:
        """What makes the watchers of a request that may get `room` tokens.

        Raises:
            ConstraintError: the constraint cannot be held to.
            MissingExtra: constraints need the extra `grammar`.
            ValueError: an empty stop string, or stop strings without a vocabulary.
        """
        constraint, text = sampling.constraint, sampling.stop_text
        if constraint is None and not text:
            return lambda: (None, None)
        if "" in text:
            raise ValueError("an empty stop string ends everything; leave it out")
        vocabulary = self._vocabulary
        if vocabulary is None:
            what = "a constraint" if constraint is not None else "stop strings"
            raise ConstraintError(f"{what} cannot be watched: the engine was built without a vocabulary")
        if constraint is None:
            return lambda: (None, StopText(vocabulary, text))
        grammars = self._compiler(vocabulary)
        first = grammars.matcher(constraint, sampling.stop, room)  # refuses here, before anything runs
        made = [first]
        return lambda: (
            made.pop() if made else grammars.matcher(constraint, sampling.stop, room),
            StopText(vocabulary, text) if text else None,
        )

    def _compiler(self, vocabulary: Vocabulary) -> Grammars:
        if self._grammars is None:
            from rollwright.engine.grammar.guided import GuidedGrammars

            self._grammars = GuidedGrammars(vocabulary)
        return self._grammars
