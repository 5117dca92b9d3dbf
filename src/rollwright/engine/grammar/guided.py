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
    from llguidance import LLMatcher


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
            else Budget(self._closing, budget, grammar.growth * self._table.openers, len(stop) > 0)
        )
        return GuidedMatcher(parser.deep_copy(), self._table, stop, marks, limits)

    def _compile(self, constraint: Constraint) -> tuple[LLMatcher, Source]:
        from llguidance import LLMatcher

        made = source(constraint, self._table.control)
        try:
            parser = LLMatcher(self._table.library, LLMatcher.grammar_from_lark(made.grammar), log_level=0)
        except ValueError as error:
            raise ConstraintError(f"{constraint.kind.value}: {error}") from error
        said = [parser.get_error()] if parser.is_error() else parser.get_grammar_warnings()
        if said:
            raise ConstraintError(f"{constraint.kind.value} cannot be enforced: {'; '.join(said)}")
        return parser, made


class GuidedMatcher:
    """Where one completion stands; see `Matcher`."""

    def __init__(
        self, parser: LLMatcher, table: Table, stop: Sequence[int], marks: Marks | None, budget: Budget | None
    ) -> None:
        self._parser = parser
        self._table = table
        self._stop = frozenset(stop)
        self._stops = bits.of(self._stop, table.size)
        self._marks = marks
        self._tail = b""
        self._budget = budget
        self._stopped = False
        self._buffer = bits.empty(table.size + 1)
        self._at = self._buffer.ctypes.data
        self._mask = self._buffer[: bits.words(table.size)]
        self._known = False

    def mask(self, out: Bits) -> None:
        """See `Matcher`."""
        self._compute()
        out[:] = self._mask

    def accept(self, token: int) -> None:
        """See `Matcher`.

        Raises:
            ValueError: the mask does not allow it.
        """
        if self._stopped or not 0 <= token < self._table.size:
            raise ValueError(f"token {token} cannot come here")
        if token in self._stop:
            if not self._parser.is_accepting():
                raise ValueError(f"stop token {token} inside a word")
            self._stopped = True
        elif not self._parser.consume_token(token):
            raise ValueError(f"token {token} leaves the constraint: {self._parser.get_error()}")
        elif self._marks is not None:
            control = token in self._table.control.values()
            self._tail = b"" if control else (self._tail + self._table.pieces[token])[-self._marks.keep :]
        if self._budget is not None:
            self._budget.spend(token)
        self._known = False

    @property
    def complete(self) -> bool:
        """See `Matcher`."""
        return self._stopped or (self._parser.is_accepting() and not self._parser.is_error())

    @property
    def ended(self) -> bool:
        """See `Matcher`."""
        if self._stopped or self._parser.is_stopped():
            return True
        self._compute()
        return not self._mask.any()

    def _compute(self) -> None:
        if self._known:
            return
        self._known = True
        if self._stopped or self._parser.is_error():
            self._mask[:] = 0
            return
        self._parser.unsafe_compute_mask_ptr(self._at, self._buffer.nbytes)
        last = self._table.end
        self._buffer[last // bits.WORD] &= ~(1 << (last % bits.WORD)) & 0xFFFFFFFF
        if self._marks is not None:
            gone = self._marks.forbidden(self._tail)
            if len(gone):
                self._mask &= ~bits.of(gone, self._table.size)
        self._mask &= ~self._stops
        if self._parser.is_accepting():
            self._mask |= self._stops
        if self._budget is not None:
            self._budget.narrow(self._mask, self._parser, self._table, self._stops)
