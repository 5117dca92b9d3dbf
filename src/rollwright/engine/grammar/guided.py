"""Constraints held to with llguidance (MIT): an Earley parser over the bytes of the tokens.

Role: the `Grammars` of the embedded engine. Neighbours: `sources` writes the grammars, `closing` finds ends,
`marks` keeps the marks of calls. Invariants: those of `base`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollwright.engine.grammar import bits
from rollwright.engine.grammar.base import Bits
from rollwright.engine.grammar.budget import Budget
from rollwright.engine.grammar.closing import Closing
from rollwright.engine.grammar.marks import Marks
from rollwright.engine.grammar.sources import Source, source
from rollwright.engine.grammar.table import Table
from rollwright.errors import ConstraintError
from rollwright.model.base import Vocabulary
from rollwright.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_INITIAL_FUEL = 200_000
_STEP_FUEL = 50_000
"""Regular expressions that the library may build before and in a step, of its 1,000,000 and 200,000: what
needs more takes longer than a tenth of a second."""
_STEP_ITEMS = 20_000
"""Earley items in a step, of its 50,000."""
_STATES = 50_000
"""States of a lexer, of its 250,000; 1 to 2 kB each."""


class GuidedGrammars:
    """Constraints over one vocabulary; the last `kept` compiled ones are kept.

    Raises:
        MissingExtra: llguidance is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, kept: int = 256) -> None:
        self._table = Table(vocabulary)
        self._closing = Closing(self._table)
        self._kept = kept
        self._marks: dict[tuple[bytes, ...], Marks] = {}
        self._compiled: OrderedDict[Constraint, tuple[LLMatcher, Source]] = OrderedDict()

    def matcher(
        self, constraint: Constraint, stop: Sequence[int], budget: int | None = None
    ) -> GuidedMatcher:
        """See `Grammars`."""
        made = self._matcher(constraint, stop, budget)
        if made.ended and not made.complete:
            # copies of a parser share its lexer: where one met a limit, all are at their end
            del self._compiled[constraint]
            made = self._matcher(constraint, stop, budget)
        if made.ended and not made.complete:
            raise ConstraintError(
                f"{constraint.kind.value}: no token of this vocabulary can begin it, stop tokens aside"
            )
        return made

    def _matcher(self, constraint: Constraint, stop: Sequence[int], budget: int | None) -> GuidedMatcher:
        if constraint not in self._compiled:
            self._compiled[constraint] = self._compile(constraint)
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        parser, grammar = self._compiled[constraint]
        marks = self._marks.get(grammar.marks)
        if grammar.marks and marks is None:
            marks = self._marks[grammar.marks] = Marks(self._table, grammar.marks)
        limits = (
            None
            if budget is None
            else Budget(self._closing, budget, grammar.growth * self._table.openers, self._stops(stop))
        )
        return GuidedMatcher(parser.deep_copy(), self._table, stop, marks, limits)

    def _stops(self, stop: Sequence[int]) -> bool:
        """Whether one of these ids is a token."""
        return any(0 <= token < self._table.size for token in stop)

    def _compile(self, constraint: Constraint) -> tuple[LLMatcher, Source]:
        from llguidance import LLMatcher

        made = source(constraint, self._table.control)
        try:
            text = LLMatcher.grammar_from_lark(made.grammar)
            parser = LLMatcher(self._table.library, text, log_level=0, limits=_limits())
        except ValueError as error:
            raise ConstraintError(f"{constraint.kind.value}: {error}") from error
        said = [parser.get_error()] if parser.is_error() else parser.get_grammar_warnings()
        if said := said or self._tried(parser):
            raise ConstraintError(f"{constraint.kind.value} cannot be enforced: {'; '.join(said)}")
        return parser, made

    def _tried(self, parser: LLMatcher) -> list[str]:
        """What goes wrong in a first token: the library builds its lexer there, and meets its limits."""
        first = parser.deep_copy()
        buffer = bits.empty(self._table.size + 1)
        first.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        tokens = bits.tokens(buffer, self._table.size)[:1]
        if tokens and not first.is_error():
            first.consume_tokens(tokens)
        return [first.get_error().partition("\n")[0] or "it allows nothing"] if first.is_error() else []


def _limits() -> LLParserLimits:
    """What the library may spend on a constraint; beyond it a constraint is refused, a matcher ends."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_STATES,
        verbose_errors=False,
    )


class GuidedMatcher:
    """Where one completion stands; see `Matcher`."""

    def __init__(
        self, parser: LLMatcher, table: Table, stop: Sequence[int], marks: Marks | None, budget: Budget | None
    ) -> None:
        self._parser = parser
        self._table = table
        self._stop = frozenset(token for token in stop if 0 <= token < table.size)
        self._stops = bits.of(self._stop, table.size)
        self._marks = marks
        self._tail = b""
        self._budget = budget
        self._stopped = False
        self._buffer = bits.empty(table.size + 1)
        self._at = self._buffer.ctypes.data
        self._mask = self._buffer[: bits.words(table.size)]
        self._known = False
        self._over = False

    def mask(self, out: Bits) -> None:
        """See `Matcher`; `out` may have fewer or more words than this vocabulary, as a model's output may."""
        self._compute()
        shared = min(len(out), len(self._mask))
        out[:shared] = self._mask[:shared]
        out[shared:] = 0

    def accept(self, token: int) -> None:
        """See `Matcher`.

        Raises:
            ValueError: the mask does not allow it.
        """
        self._compute()
        if self._stopped or not 0 <= token < self._table.size:
            raise ValueError(f"token {token} cannot come here")
        if token in self._stop:
            if not self._parser.is_accepting():
                raise ValueError(f"stop token {token} inside a word")
            self._stopped = True
        elif not self._parser.consume_token(token):
            if not bits.has(self._mask, token):
                raise ValueError(f"token {token} leaves the constraint: {self._parser.get_error()}")
            # else a limit of the library was met: the word ends here, unfinished
        elif self._marks is not None:
            control = token in self._table.control.values()
            self._tail = b"" if control else (self._tail + self._table.pieces[token])[-self._marks.keep :]
        if self._budget is not None:
            self._budget.spend(token)
        self._known = False

    @property
    def complete(self) -> bool:
        """See `Matcher`."""
        return self._stopped or (not self._parser.is_error() and self._parser.is_accepting())

    @property
    def ended(self) -> bool:
        """See `Matcher`."""
        if self._stopped or self._parser.is_stopped():
            return True
        self._compute()
        return self._over

    def _compute(self) -> None:
        """The mask, and whether nothing but a stop token can come."""
        if self._known:
            return
        self._known = True
        if not self._stopped and not self._parser.is_error():
            self._parser.unsafe_compute_mask_ptr(self._at, self._buffer.nbytes)
        if self._stopped or self._parser.is_error():  # the mask itself may meet a limit of the library
            self._mask[:] = 0
            self._over = True
            return
        last = self._table.end
        self._buffer[last // bits.WORD] &= ~(1 << (last % bits.WORD)) & 0xFFFFFFFF
        if self._marks is not None:
            gone = self._marks.forbidden(self._tail)
            if len(gone):
                self._mask &= ~bits.of(gone, self._table.size)
        self._mask &= ~self._stops
        self._over = not self._mask.any()
        if self._parser.is_accepting():
            self._mask |= self._stops
        if self._budget is not None:
            self._budget.narrow(self._mask, self._parser, self._table, self._stops)
