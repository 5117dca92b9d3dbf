"""What a run was and what became of it, as tables.

Role: the report's words and counts. Neighbours: `folder` gives the run, `report` sets what is here into the
page. Invariant: what has no data says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollwright.archive.base import Line
from rollwright.evals.statistics import Difference, paired_difference
from rollwright.events import Evaluated, GroupEnded, Noted, Resumed, RunStarted
from rollwright.monitor.engine import described
from rollwright.monitor.evaluations import ENDS, newest, titled
from rollwright.types import Outcome
from rollwright.view.folder import RunView
from rollwright.view.rollouts import split_of

REASONS = 6
"""Reasons shown of one disposition."""


@dataclass(frozen=True)
class Count:
    """A bar: how many of how many, and the reasons where some were given."""

    name: str
    number: int
    total: int
    tone: str = ""
    reasons: list[tuple[str, int]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """0 to 1."""
        return self.number / self.total if self.total else 0.0


@dataclass(frozen=True)
class Measured:
    """One mode of evaluation: what was found before and after, each under its title, and the paired gain."""

    mode: str
    found: list[tuple[str, Evaluated | None]]
    gain: Difference | None
    pairs: int


@dataclass(frozen=True)
class Note:
    """Something a process told."""

    level: str
    text: str
    when: str


def header(view: RunView) -> list[tuple[str, str]]:
    """Facts in a line each: what, how long, which versions."""
    figures, config = view.figures, view.config
    steps = f"{figures.step} of {config.loop.steps}" if config else str(figures.step)
    facts = [
        ("mode", config.mode if config else "unknown"),
        ("steps", steps),
        ("took", clock(figures.seconds) if view.events else "no event was written"),
        ("began", moment(view.events[0].wall) if view.events else "no event was written"),
    ]
    if view.ledger:
        facts.append(("rollouts started", f"{view.ledger.counts.started:,}"))
        last = view.ledger.commits[-1] if view.ledger.commits else None
        facts.append(("last commit", str(last.version) if last else "none: nothing to resume from"))
        if last and last.checkpoint:
            facts.append(("checkpoint", last.checkpoint[:16]))
        forks = view.ledger.lineage.forks
        resumed = ", ".join(f"{number} at step {step}" for number, step in enumerate(forks))
        facts.append(("incarnations", resumed))
    facts.append(("rollouts kept", f"{len(view.lines):,}"))
    facts.append(("engine, last told", ", ".join(f"{name} {text}" for name, text in described(figures.live))))
    return facts


def versions(view: RunView) -> list[tuple[str, str]]:
    """What the run computed with, each version once; empty for a run that told nothing of it."""
    found: dict[str, list[str]] = {}
    for logged in view.events:
        if isinstance(logged.event, RunStarted):
            for name, version in logged.event.versions.items():
                if version not in found.setdefault(name, []):
                    found[name].append(version)
    return [(name, ", then ".join(each)) for name, each in found.items()]


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    hours, minutes, rest = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02d}:{rest:02d} hours" if hours else f"{minutes}:{rest:02d} minutes"


def moment(wall: float) -> str:
    """A wall time in UTC."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M UTC")


def measured(view: RunView) -> list[Measured]:
    """What the run measured of itself, a line for each mode; of a repeated one the newest policy counts."""
    found = newest(_evaluations(view))
    labels = [label for label in ENDS if any(label == other for other, _ in found)]
    titles = {
        label: ", ".join(
            dict.fromkeys(
                titled(e, view.figures.step) for (other, _), e in sorted(found.items()) if other == label
            )
        )
        for label in labels
    }
    lines = []
    for mode in dict.fromkeys(mode for label, mode in found if label in ENDS):
        gain, pairs = _gain(view, found.get(("before", mode)), found.get(("after", mode)))
        lines.append(
            Measured(mode, [(titles[label], found.get((label, mode))) for label in labels], gain, pairs)
        )
    return lines


def further(view: RunView) -> list[tuple[str, Evaluated]]:
    """What `rollwright eval` measured, each under its title. It may be of other tasks: never compared."""
    last = view.figures.step
    return [(titled(e, last), e) for (label, _), e in newest(_evaluations(view)).items() if label not in ENDS]


def _evaluations(view: RunView) -> list[Evaluated]:
    return [e.event for e in view.events if isinstance(e.event, Evaluated)]


def _gain(view: RunView, before: Evaluated | None, after: Evaluated | None) -> tuple[Difference | None, int]:
    """Success after minus before on the tasks, by id and content, that both scored; and their number."""
    if before is None or after is None or view.config is None:
        return None, 0
    success = view.config.rollout.success
    first, last = (
        {
            (line.task, line.digest): float(line.value >= success)
            for line in _lines_of(view, each)
            if line.value is not None
        }
        for each in (before, after)
    )
    both = [task for task in first if task in last]
    if len(both) < 2:
        return None, len(both)
    return paired_difference([first[task] for task in both], [last[task] for task in both]), len(both)


def _lines_of(view: RunView, evaluation: Evaluated) -> list[Line]:
    """The rollouts of one evaluation; of one that does not name them (an older log), the newest that fit."""
    by: dict[str, list[Line]] = {}
    for line in view.lines:
        if line.job == "eval" and split_of(line) == f"{evaluation.label}, {evaluation.mode}":
            by.setdefault(line.group.rpartition("/")[0], []).append(line)
    name = evaluation.rollouts or next(reversed(by), "")
    return by.get(name, [])


def outcomes(view: RunView) -> list[Count]:
    """How rollouts ended."""
    scorable = {outcome.value: outcome.scorable for outcome in Outcome}
    by = Counter(line.outcome for line in view.lines)
    tones = {name: "plain" if scorable.get(name) else "bad" for name in by}
    return _counted(by, tones)


def dispositions(view: RunView) -> list[Count]:
    """Where started rollouts stand in the ledger, with reasons; numbers in a reason are left out."""
    if view.ledger is None:
        return []
    reasons: dict[str, Counter[str]] = {}
    for entry in view.ledger.entries.values():
        text = re.sub(r"\S*\d\S*", "…", entry.reason)
        reasons.setdefault(entry.disposition.value, Counter())[text] += 1
    by = Counter({name: sum(counted.values()) for name, counted in reasons.items()})
    tones = {"trained": "good", "evaluated": "plain", "void": "bad", "unscorable": "bad"}
    told = {n: [(r, k) for r, k in c.most_common(REASONS) if r] for n, c in reasons.items()}
    return _counted(by, tones, told)


def fates(view: RunView) -> list[Count]:
    """What became of groups."""
    ended = [e.event for e in view.events if isinstance(e.event, GroupEnded)]
    by = Counter("kept" if event.kept else event.reason or "dropped" for event in ended)
    return _counted(by, {"kept": "good"})


def calls(statuses: Counter[str]) -> list[Count]:
    """How calls ended."""
    return _counted(statuses, {"ok": "good"})


def _counted(
    by: Counter[str], tones: dict[str, str], reasons: dict[str, list[tuple[str, int]]] | None = None
) -> list[Count]:
    total = sum(by.values())
    return [
        Count(name.replace("_", " "), number, total, tones.get(name, "plain"), (reasons or {}).get(name, []))
        for name, number in by.most_common()
    ]


def notes(view: RunView) -> list[Note]:
    """What the processes told, oldest first."""
    return [
        Note(each.event.level, each.event.text, moment(each.wall))
        for each in view.events
        if isinstance(each.event, Noted)
    ]


def fatal(view: RunView) -> str:
    """What ended the newest part of a run that is not finished; "" where nothing says so."""
    text = ""
    for each in view.events:
        match each.event:
            case RunStarted() | Resumed() if not each.aside:
                text = ""
            case Noted(level="fatal") as note:
                text = text or note.text
            case _:
                pass
    return "" if view.state == "finished" else text


def examples(view: RunView) -> list[tuple[str, Line]]:
    """Rollouts worth a look: a success, a failure, one that could not be scored; the longest of the latest
    evaluation or, without one, of training."""
    success = view.config.rollout.success if view.config else 1.0
    kinds: dict[str, list[Line]] = {"a success": [], "a failure": [], "one without a score": []}
    for line in view.lines:
        value = _value(line)
        which = "one without a score" if value is None else "a success" if value >= success else "a failure"
        kinds[which].append(line)
    latest: dict[str, int] = {}
    for place, line in enumerate(view.lines):
        latest[split_of(line)] = place
    preferred = max((s for s in latest if s.endswith("sampled")), key=lambda s: latest[s], default="train")
    found = []
    for name, fitting in kinds.items():
        # At the end of every run some are cancelled: that shows nothing.
        lines = [line for line in fitting if line.outcome != Outcome.CANCELLED.value] or fitting
        lines = [line for line in lines if split_of(line) == preferred] or lines
        if lines:
            found.append((name, _middling(lines)))
    return found


def _middling(lines: Iterable[Line]) -> Line:
    """The first with the most turns among those of at most 6, so that it can be shown."""
    return max(lines, key=lambda line: line.turns if line.turns <= 6 else -line.turns)


def _value(line: Line) -> float | None:
    return line.value if line.value is not None and math.isfinite(line.value) else None
