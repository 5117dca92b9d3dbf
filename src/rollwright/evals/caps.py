"""How long rollouts really get, and the limits that follow: a suggestion, never more.

Role: from rollouts to the 99th percentile of their tokens and turns, and a limit a margin above it.
Neighbours: `assess` and the report show it; a person sets it. Invariants: only rollouts whose end the policy
brought about count; where a limit cut more than 1 % of them, what they would have used is not known and no
lower one is suggested; nothing is applied here, and evaluations are never looked at.

Why it pays: memory for keys and values is planned for the longest row that a task allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollwright.types import Finish, Outcome, Rollout, Task

QUANTILE = 0.99
MARGIN = 0.25
"""Room above the quantile."""
CUT = 0.01
"""Share of rollouts at a limit from which it, not the policy, decides how long they get."""
LEAST = 20
"""Rollouts below which nothing is said."""
VALUES = 8
"""A tag with at most this many values splits a task set into kinds."""


@dataclass(frozen=True)
class Use:
    """What one rollout used of its limits."""

    set: str
    tags: tuple[tuple[str, str], ...]
    used: tuple[int, int, int]
    """Tokens of its longest row, turns, tokens of its longest turn."""
    allowed: tuple[int, int, int]
    cut: tuple[bool, bool, bool]
    """Whether that limit ended it, or a turn of it."""


@dataclass(frozen=True)
class Cap:
    """One limit of one kind of task."""

    kind: str
    """Name of the task set, and the tag where it has kinds: `gym, dataset = leg_counting`."""
    limit: str
    """`max_tokens`, `max_turns` or `turn_tokens`."""
    rollouts: int
    p99: int
    longest: int
    allowed: int
    cut: float
    """Share of rollouts that it cut."""
    suggested: int | None
    """None: it cuts too many to say how long they would get."""

    @property
    def lower(self) -> bool:
        """Whether the suggestion is less than what is allowed."""
        return self.suggested is not None and self.suggested < self.allowed


LIMITS = (("max_tokens", 16), ("max_turns", 1), ("turn_tokens", 8))
"""Name of each limit, and what a suggestion is a multiple of."""


def use(task: Task, rollout: Rollout) -> Use | None:
    """What `rollout` used; None where infrastructure ended it, or it never spoke."""
    if not rollout.outcome.scorable or not rollout.turns:
        return None
    limits = task.limits
    turns = [turn.end - turn.start for turn in rollout.turns]
    long = any(
        turn.finish is Finish.LENGTH and size >= limits.turn_tokens
        for turn, size in zip(rollout.turns, turns, strict=True)
    )
    return Use(
        set=task.set,
        tags=tuple(sorted(task.tags.items())),
        used=(max(len(row.tokens) for row in rollout.rows), len(turns), max(turns)),
        allowed=(limits.max_tokens, limits.max_turns, limits.turn_tokens),
        cut=(rollout.outcome is Outcome.CONTEXT_FULL, rollout.outcome is Outcome.MAX_TURNS, long),
    )


def caps(uses: Iterable[Use | None]) -> list[Cap]:
    """The limits of every kind of task with at least `LEAST` rollouts, in the order of their names."""
    sets: dict[str, list[Use]] = defaultdict(list)
    for each in uses:
        if each is not None:
            sets[each.set].append(each)
    found = []
    for name, members in sorted(sets.items()):
        for kind, those in sorted(_kinds(name, members).items()):
            if len(those) >= LEAST:
                found += [_cap(kind, at, those) for at in range(len(LIMITS))]
    return found


def told(found: Sequence[Cap]) -> Iterator[str]:
    """The suggestions for a person, line by line; nothing where there are none."""
    if not found:
        return
    yield f"limits: {QUANTILE:.0%} of rollouts use no more than"
    for cap in found:
        yield (
            f"  {cap.kind}, {cap.limit}: {cap.p99} (longest {cap.longest}, allowed {cap.allowed}, "
            f"{cap.cut:.0%} cut, {cap.rollouts} rollouts): {advice(cap)}"
        )
    if lower := settings(found):
        yield f"  to take them: {' '.join(f'--set {each}' for each in lower)}"
        yield "  nothing was changed; a limit holds for evaluations too, so compare runs under the same ones"


def advice(cap: Cap) -> str:
    """What to do about one limit, in words."""
    if cap.suggested is None:
        return f"keep or raise it: it cuts {cap.cut:.0%}"
    return f"{cap.suggested} would do" if cap.lower else "right as it is"


def settings(found: Sequence[Cap]) -> list[str]:
    """The keys that take the suggestions over, where all kinds of the run allow a lower limit; the highest of
    them."""
    keys = []
    for limit, _ in LIMITS:
        those = [cap for cap in found if cap.limit == limit]
        if those and all(cap.lower for cap in those):
            keys.append(f"tasks.limits.{limit}={max(cap.suggested or 0 for cap in those)}")
    return keys


def _kinds(name: str, members: list[Use]) -> dict[str, list[Use]]:
    """`members` of a task set by its first tag with a few values; as one where there is none."""
    values: dict[str, set[str]] = defaultdict(set)
    for each in members:
        for tag, value in each.tags:
            values[tag].add(value)
    split = [tag for tag in sorted(values) if 1 < len(values[tag]) <= VALUES]
    if not split:
        return {name: members}
    tag = split[0]
    kinds: dict[str, list[Use]] = defaultdict(list)
    for each in members:
        kinds[f"{name}, {tag} = {dict(each.tags).get(tag, 'none')}"].append(each)
    return dict(kinds)


def _cap(kind: str, at: int, members: Sequence[Use]) -> Cap:
    limit, step = LIMITS[at]
    used = [each.used[at] for each in members]
    quantile = int(np.quantile(used, QUANTILE, method="higher"))
    cut = sum(each.cut[at] for each in members) / len(members)
    allowed = max(each.allowed[at] for each in members)
    wanted = -(-int(np.ceil(quantile * (1 + MARGIN))) // step) * step
    return Cap(
        kind=kind,
        limit=limit,
        rollouts=len(members),
        p99=quantile,
        longest=max(used),
        allowed=allowed,
        cut=cut,
        suggested=None if cut > CUT else min(wanted, allowed),
    )
