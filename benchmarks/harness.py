"""What every benchmark here shares: flags, cases, the last line, and a training run to measure.

A benchmark measures; it never knows the bar (bars stand in `docs/benchmarks.md`). Its last line is one JSON
object: `{"name": …, "cases": [{"case", "ours", "theirs", "ratio", "low", "high", "unit"}]}`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.events import Evaluated, StepEnded, read_events
from rollwright.monitor.figures import Figures
from rollwright.run.begin import begin
from rollwright.run.conductor import WorkerFailed, supervise
from rollwright.run.evaluation import evaluate
from rollwright.run.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "records.toml"
ATLAS = ROOT / "examples" / "atlas.toml"


@dataclass(frozen=True)
class Case:
    """One measured figure; `ratio` is the one that a bar speaks of, `low`/`high` its spread."""

    case: str
    ours: float | None
    theirs: float | None
    ratio: float | None
    low: float | None
    high: float | None
    unit: str


@dataclass
class Cases:
    """The cases of one benchmark, in order."""

    name: str
    found: list[Case] = field(default_factory=list)

    def add(
        self,
        case: str,
        ours: float,
        theirs: float | None = None,
        *,
        ratio: float | None = None,
        low: float | None = None,
        high: float | None = None,
        unit: str,
    ) -> None:
        """Add a case and tell it on standard error; without a ratio the figure itself is it."""
        ratio = ours if ratio is None else ratio
        self.found.append(Case(case, ours, theirs, ratio, low, high, unit))
        print(f"{case}: {ratio:.4g} {unit}", file=sys.stderr, flush=True)

    def finish(self, keep: bool) -> None:
        """Print the last line; `keep` also stores it under `baselines/`."""
        line = json.dumps({"name": self.name, "cases": [asdict(case) for case in self.found]})
        if keep:
            (ROOT / "benchmarks" / "baselines" / f"{self.name}.json").write_text(line + "\n")
        print(line)


def parser(description: str) -> argparse.ArgumentParser:
    """The flags of every benchmark."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="under a minute, same cases, fewer repeats")
    made.add_argument("--keep", action="store_true", help="store the result under benchmarks/baselines")
    return made


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder and what it looked like."""

    folder: RunFolder
    figures: Figures
    seconds: float

    def evaluation(self, label: str, mode: str) -> Evaluated:
        """One evaluation of the run."""
        return next(e for e in self.figures.evaluations if (e.label, e.mode) == (label, mode))

    def warm_seconds(self) -> float:
        """Wall seconds of the supervised warm start."""
        return self.figures.live["warmstart/seconds"]

    def rl_seconds(self) -> float:
        """Wall seconds from the end of the first evaluation to the last optimiser step."""
        log = read_events(self.folder.path)
        began = max(x.wall for x in log if isinstance(x.event, Evaluated) and x.event.label == "before")
        return max(x.wall for x in log if isinstance(x.event, StepEnded)) - began

    def success(self, label: str, mode: str) -> float:
        """Share of held-out tasks solved."""
        found = self.evaluation(label, mode)
        return found.successes / found.trials


BENCH = ("evaluation.tasks=512", 'name="bench"')
"""What every measured run has beside the example: enough held-out tasks for an interval of ±2 points at 95
%."""

QUICK = (
    "tasks.hops=1",
    "tasks.people=4",
    "tasks.habits.table=0.4",
    "warmstart.steps=130",
    "loop.steps=2",
    "loop.groups=4",
    "evaluation.tasks=32",
)
"""Makes the records run short enough for `--quick`: the same path through the code, a smaller task."""

QUICK_ATLAS = (
    "tasks.hops=1",
    "tasks.habits.table=0.4",
    "warmstart.steps=60",
    "loop.steps=0",
    "evaluation.tasks=32",
)
"""The same for the atlas run, which takes too long to learn anything in a minute."""


def train(overrides: list[str], quick: bool, last: Sequence[str] = (), example: Path = EXAMPLE) -> Trained:
    """Train an example with overrides (`last` wins over `--quick`), in the processes of a user's run."""
    clock = SystemClock()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = here + os.pathsep + os.environ.get("PYTHONPATH", "")
    shorter = QUICK_ATLAS if example == ATLAS else QUICK
    config = load([example], [*BENCH, *overrides, *(shorter if quick else ()), *last])
    folder, began = begin(config), clock.now()
    print(f"{folder.path}: {' '.join(overrides)}", file=sys.stderr, flush=True)
    console = Console(file=sys.stderr, force_terminal=False)
    try:
        _, figures = supervise(folder, config, console, clock)
    except WorkerFailed as error:
        if "carried no signal" not in str(error):
            raise
        print(f"{folder.path}: {error}", file=sys.stderr, flush=True)
        figures = _given_up(folder, config.loop.steps)
    return Trained(folder, figures, clock.now() - began)


def _given_up(folder: RunFolder, steps: int) -> Figures:
    """A run that its own signal guard stopped is measured where it stood: its newest checkpoint is
    evaluated."""
    figures = Figures(steps)
    for logged in read_events(folder.path):
        figures.feed(logged)
    for found in evaluate(folder, [], SystemClock()):
        figures.evaluations.append(msgspec.structs.replace(found, label="after"))
    return figures
