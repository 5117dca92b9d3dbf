"""Which evaluation is meant, by label and step and never by its place in the log.

Role: what terminal and report say of the measurements of a run. Neighbours: `Evaluated` events. Invariants:
before and after are those of the run itself; whatever `rollwright eval` measured stands apart, under its own
name; a measurement that is not of the newest policy says of which.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollwright.events import Evaluated

ENDS = ("before", "after")
"""The labels under which a run measures itself."""


def newest(evaluations: Sequence[Evaluated]) -> dict[tuple[str, str], Evaluated]:
    """The newest by (label, mode): of the highest incarnation and step, whenever it was written."""
    found: dict[tuple[str, str], Evaluated] = {}
    for each in evaluations:
        known = found.get((each.label, each.mode))
        if known is None or _place(each) >= _place(known):
            found[each.label, each.mode] = each
    return found


def titled(evaluation: Evaluated, step: int | None) -> str:
    """Its label, with its step where that is not the expected one: 0 for "before", `step` (the run's last)
    for the others."""
    expected = 0 if evaluation.label == "before" else step
    known = evaluation.step is None or evaluation.step == expected
    return evaluation.label if known else f"{evaluation.label} (step {evaluation.step})"


def _place(evaluation: Evaluated) -> tuple[int, int]:
    return evaluation.incarnation, -1 if evaluation.step is None else evaluation.step
