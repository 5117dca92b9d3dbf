"""Why rollouts failed, as a person would look: how they ended, what came of their calls, one of them whole.

Role: the evidence beside a verdict of "no signal" or "all wrong". Neighbours: `run.assess` shows it, training
may; `transcript` tells the one rollout. Invariants: shows only what the records hold; where a limit cut
something, the key that raises it is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rollwright.monitor.transcript import transcript
from rollwright.types import CallStatus, Finish, Outcome, Scored, Task

LONGEST = 100
"""Characters of a message."""
SHARE = 0.01
"""Smaller shares are left out."""

MENDS = {
    CallStatus.TIMEOUT: "raise tasks.limits.tool_seconds",
    CallStatus.MEMORY: "raise sandbox.memory_mib",
    CallStatus.OUTPUT: "raise sandbox.output_kib",
    CallStatus.DENIED: "name the tool in tasks.tools, or script no calls of it",
    CallStatus.UNKNOWN_TOOL: "more warmstart.steps",
    CallStatus.MALFORMED: "more warmstart.steps",
    Outcome.CONTEXT_FULL: "raise tasks.limits.max_tokens",
    Outcome.MAX_TURNS: "raise tasks.limits.max_turns",
    Outcome.TURN_TIMEOUT: "raise tasks.limits.turn_seconds",
    Outcome.ROLLOUT_TIMEOUT: "raise tasks.limits.rollout_seconds",
}
CUT = "raise tasks.limits.turn_tokens"


def evidence(tried: Sequence[tuple[Task, Scored]], success: float = 1.0) -> list[str]:
    """Lines about rollouts with their tasks: outcomes, calls, failed checks, and one failed rollout. From the
    value `success` on a rollout is none of the failed ones. Nothing without rollouts."""
    if not tried:
        return []
    lines = [*_outcomes(tried), *_turns(tried), *_calls(tried), *_checks(tried)]
    failed = [pair for pair in tried if (pair[1].score.value or 0.0) < success - 1e-9]
    if failed:
        lines += ["one that failed:", *transcript(*_typical(failed)).splitlines()]
    return lines


def _outcomes(tried: Sequence[tuple[Task, Scored]]) -> Iterator[str]:
    counted = Counter(scored.rollout.outcome for _, scored in tried)
    told = [
        _share(outcome.value, count, len(tried), MENDS.get(outcome, ""))
        for outcome, count in counted.most_common()
        if count >= SHARE * len(tried)
    ]
    yield f"rollouts ended: {'; '.join(told)}"


def _turns(tried: Sequence[tuple[Task, Scored]]) -> Iterator[str]:
    finishes = [turn.finish for _, scored in tried for turn in scored.rollout.turns]
    if cut := finishes.count(Finish.LENGTH):
        yield f"turns: {_share('cut at the token limit', cut, len(finishes), CUT)}"


def _calls(tried: Sequence[tuple[Task, Scored]]) -> Iterator[str]:
    results = [r for _, scored in tried for turn in scored.rollout.turns for r in turn.results]
    if not results:
        wanted = any(task.tools for task, _ in tried)
        if wanted:
            yield "calls: none in any rollout → more warmstart.steps"
        return
    messages: dict[CallStatus, Counter[str]] = defaultdict(Counter)
    for result in results:
        messages[result.status][" ".join(result.content.split())] += 1
    told = []
    for status, texts in sorted(messages.items(), key=lambda item: -item[1].total()):
        if texts.total() < SHARE * len(results):
            continue
        text = texts.most_common(1)[0][0]
        mend = CUT if "cut at" in text else MENDS.get(status, "")
        short = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        name = status.value if status is CallStatus.OK else f"{status.value} (mostly: {short})"
        told.append(_share(name, texts.total(), len(results), mend))
    yield f"{len(results)} calls: {'; '.join(told)}"


def _checks(tried: Sequence[tuple[Task, Scored]]) -> Iterator[str]:
    """The check that failed first in each rollout: a twin isn't run where a cheaper one failed."""
    first = Counter(
        next((part.name for part in scored.score.parts if part.value < 1), "")
        for _, scored in tried
        if scored.score.value is not None
    )
    first.pop("", None)
    if first:
        told = [_share(name, count, len(tried), "") for name, count in first.most_common()]
        yield f"checks that failed first: {'; '.join(told)}"


def _share(name: str, count: int, of: int, mend: str) -> str:
    return f"{name} {100 * count / of:.0f} %" + (f" → {mend}" if mend else "")


def _typical(failed: Sequence[tuple[Task, Scored]]) -> tuple[Task, Scored]:
    """The first rollout that failed as most of them did: the same outcome and the same worst call."""

    def kind(pair: tuple[Task, Scored]) -> tuple[str, str]:
        rollout = pair[1].rollout
        statuses = Counter(r.status.value for turn in rollout.turns for r in turn.results)
        statuses.pop(CallStatus.OK.value, None)
        return rollout.outcome.value, statuses.most_common(1)[0][0] if statuses else ""

    common = Counter(map(kind, failed)).most_common(1)[0][0]
    return next(pair for pair in failed if kind(pair) == common)
