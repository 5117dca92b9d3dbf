"""The text pieces of a small tokenizer, read from what sample tasks say.

Role: what `own` and `gym` give as `TaskSet.pieces`, where nobody names them. Neighbours: those two.
Invariants: the same samples give the same pieces, in the same order; a piece occurs in the samples, so a
model has seen it; what varies from sample to sample is never glued to what stands beside it, so a name is
written with the same pieces wherever it stands.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

FIXED = 0.5
"""A word that occurs in more than this share of the samples belongs to the wording."""
KNOWN = 0.02
"""Other words, and runs of the wording, are pieces from this share on; rarer words are spelled."""
LONGEST = 200
"""Characters of a piece."""

_PARTS = re.compile(r"\d|[^\W\d_]+|_|[^\w]", re.UNICODE)


def pieces_of(samples: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Pieces for texts like those of `samples` (one list of texts each), the most frequent first.

    Words common to most samples are joined into the runs they stand in; other frequent words stand alone; a
    digit always does.
    """
    seen = Counter(part for texts in samples for part in {p for text in texts for p in _split(text)})
    fixed = {part for part, count in seen.items() if count > FIXED * len(samples) and not part.isdigit()}
    found: Counter[str] = Counter()
    for texts in samples:
        found.update({run for text in texts for run in _runs(_split(text), fixed)})
    kept = [(-count, run) for run, count in found.items() if count >= KNOWN * len(samples) and len(run) > 1]
    return tuple(run for _, run in sorted(kept))


def _split(text: str) -> list[str]:
    """Words, digits and single other characters; together they are the text."""
    return _PARTS.findall(text)


def _runs(parts: Sequence[str], fixed: set[str]) -> list[str]:
    """The parts, with neighbours of the wording joined."""
    runs: list[str] = []
    joining = False
    for part in parts:
        if part in fixed and joining and len(runs[-1]) + len(part) <= LONGEST:
            runs[-1] += part
        else:
            runs.append(part)
        joining = part in fixed
    return runs
