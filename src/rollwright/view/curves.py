"""The curves of a run: what changes with the steps and with time.

Role: numbers for the report's charts. Neighbours: events and the archive's lines give them, `charts.js` draws
them. Invariants: a point without data is None, never 0; an interval holds its estimate; a chart without data
says why it has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from rollwright.archive.base import Line
from rollwright.evals.statistics import wilson
from rollwright.events import Evaluated, Metrics, Resumed, RunStarted, StepEnded
from rollwright.monitor.engine import COMPLIANCE, DECODE_RATE, DECODE_VARIATION, GAP_P99, HIT_RATE
from rollwright.monitor.evaluations import ENDS
from rollwright.view.folder import RunView

POINTS = 120
"""Most points of a curve over steps that carries intervals; neighbouring steps are taken together."""
MOMENTS = 600
"""Most points of a curve over time."""

Number = float | None


class Series(Struct, kw_only=True):
    """One line; `low` and `high` bound its 95 % interval where it has one."""

    name: str
    values: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None
    points: bool = False
    """Single measurements: not joined by a line."""


class Chart(Struct, kw_only=True):
    """One chart. `kind` is how values are shown: `share`, `number` or `count`; x is `step` or `minutes`."""

    title: str
    note: str
    x: list[float]
    series: list[Series]
    kind: str = "number"
    axis: str = "step"
    marks: list[float] = []
    """Where the run was taken up again."""
    empty: str = ""
    """Why there is nothing to draw."""


def charts(view: RunView) -> list[Chart]:
    """Every chart of the report, the most telling first."""
    steps = {e.event.step: e.event for e in view.events if isinstance(e.event, StepEnded)}
    resumes = [float(e.event.step) for e in view.events if isinstance(e.event, Resumed)]
    found = [_success(view), _reward(view)]
    for title, kind, note, names in _BY_STEP:
        found.append(_of_steps(title, kind, note, names, list(steps.values())))
    for chart in found:
        chart.marks = resumes
    return [*found, *_over_time(view), _warm(view)]


_BY_STEP = (
    (
        "Entropy",
        "number",
        "Nats per sampled token of the trained batch. A fall to 0 ends exploration.",
        {"train/entropy": "entropy"},
    ),
    (
        "Staleness",
        "number",
        "Steps between the policy that sampled a group and the one trained on it.",
        {"train/lag_mean": "mean", "train/lag_max": "largest"},
    ),
    ("Gradient norm", "number", "Before clipping.", {"train/grad_norm": "norm"}),
    (
        "Clipped tokens",
        "share",
        "Share of sampled tokens whose ratio left the clip range.",
        {"train/clip_share": "clipped"},
    ),
    (
        "Distance to the sampling policy",
        "number",
        "KL to the policy that sampled, nats per token.",
        {"train/kl_old": "KL"},
    ),
)


def _of_steps(title: str, kind: str, note: str, names: dict[str, str], steps: Sequence[StepEnded]) -> Chart:
    steps = sorted(steps, key=lambda step: step.step)
    series = [
        Series(name=shown, values=[_finite(step.metrics.get(name)) for step in steps])
        for name, shown in names.items()
    ]
    return _chart(
        title, note, [float(step.step) for step in steps], series, kind, empty="No step has been trained."
    )


def _chart(
    title: str, note: str, x: list[float], series: list[Series], kind: str, *, axis: str = "step", empty: str
) -> Chart:
    """A chart, emptied where no series has a value."""
    series = [each for each in series if any(value is not None for value in each.values)]
    if not series:
        return Chart(title=title, note=note, x=[], series=[], kind=kind, axis=axis, empty=empty)
    return Chart(title=title, note=note, x=x, series=series, kind=kind, axis=axis)


def _finite(value: Number) -> Number:
    return value if value is not None and math.isfinite(value) else None


def step_of(line: Line) -> int | None:
    """The step of the oldest policy that sampled a rollout; None where nothing was sampled."""
    steps = [version.rpartition(".")[2] for version in line.versions]
    return min((int(step) for step in steps if step.isdigit()), default=None)


def _binned(lines: Iterable[Line]) -> dict[float, list[Line]]:
    """Scored training rollouts by the step that sampled them; with many steps, by the middle of a few."""
    by: dict[int, list[Line]] = {}
    for line in lines:
        step = step_of(line)
        if line.job == "train" and _finite(line.value) is not None and step is not None:
            by.setdefault(step, []).append(line)
    width = math.ceil((max(by) + 1) / POINTS) if by else 1
    binned: dict[float, list[Line]] = {}
    for step in sorted(by):
        binned.setdefault((step // width) * width + (width - 1) / 2, []).extend(by[step])
    return binned


def _groups(lines: Sequence[Line], values: Sequence[float]) -> list[list[float]]:
    by: dict[str, list[float]] = {}
    for line, value in zip(lines, values, strict=True):
        by.setdefault(line.group, []).append(value)
    return list(by.values())


def _spread(groups: Sequence[Sequence[float]], mean: float) -> Number:
    """Standard error of the mean over groups of unequal sizes (a ratio estimate); None of one group."""
    count, total = len(groups), sum(len(group) for group in groups)
    if count < 2:
        return None
    squares = sum((sum(group) - mean * len(group)) ** 2 for group in groups)
    return math.sqrt(squares * count / (count - 1)) / total


def share(lines: Sequence[Line], success: float) -> tuple[float, float, float]:
    """(share, low, high) of rollouts that reach `success`.

    Siblings share a task, so they count as fewer than they are: Wilson's interval is that of the number of
    independent rollouts with the same spread, no fewer than the groups and no more than the rollouts.
    """
    hits = [float(line.value is not None and line.value >= success) for line in lines]
    groups, rate = _groups(lines, hits), sum(hits) / len(hits)
    spread = _spread(groups, rate)
    independent = len(groups)
    if spread is not None and 0 < rate < 1:
        variance = rate * (1 - rate)
        alone = spread**2 * len(hits) <= variance  # siblings differ as much as strangers, or more
        independent = len(hits) if alone else max(len(groups), round(variance / spread**2))
    low, high = wilson(round(rate * independent), independent)
    return rate, min(low, rate), max(high, rate)


def _success(view: RunView) -> Chart:
    success = view.config.rollout.success if view.config else 1.0
    binned = _binned(view.lines)
    found = {at: share(lines, success) for at, lines in binned.items()}
    measured = _measured(view)
    x = sorted({*found, *(at for points in measured.values() for at in points)})
    series = [
        Series(
            name="training rollouts",
            values=[found[at][0] if at in found else None for at in x],
            low=[found[at][1] if at in found else None for at in x],
            high=[found[at][2] if at in found else None for at in x],
        )
    ]
    for mode, points in measured.items():
        of = [points.get(at) for at in x]
        series.append(
            Series(
                name=f"held-out, {mode}",
                values=[e.successes / e.trials if e else None for e in of],
                low=[e.low if e else None for e in of],
                high=[e.high if e else None for e in of],
                points=True,
            )
        )
    note = f"Share of scored rollouts with reward ≥ {success:g}, by the step whose policy sampled them."
    return _chart("Success", note, x, series, "share", empty="No rollout has been scored.")


def _measured(view: RunView) -> dict[str, dict[float, Evaluated]]:
    """The run's own evaluations by mode and the step of the policy that was measured."""
    found: dict[str, dict[float, Evaluated]] = {}
    step = 0
    for logged in view.events:
        match logged.event:
            case StepEnded(step=reached) | Resumed(step=reached):
                step = reached
            case Evaluated(trials=trials, label=label) as event if trials and label in ENDS:
                at = step if event.step is None else event.step  # an older log says nothing of it
                found.setdefault(event.mode, {})[float(at)] = event
            case _:
                pass
    return found


def _reward(view: RunView) -> Chart:
    x, values, low, high = [], [], [], []
    for at, lines in _binned(view.lines).items():
        rewards = [line.value for line in lines if line.value is not None]
        mean = statistics.fmean(rewards)
        spread = _spread(_groups(lines, rewards), mean)
        x.append(at)
        values.append(mean)
        low.append(None if spread is None else mean - 1.96 * spread)
        high.append(None if spread is None else mean + 1.96 * spread)
    series = [Series(name="mean reward", values=list(values), low=list(low), high=list(high))]
    note = "Of scored training rollouts; the interval takes groups as the unit."
    return _chart("Reward", note, x, series, "number", empty="No rollout has been scored.")


_BY_TIME = (
    (
        "Idle shares",
        "share",
        "How much of their time both sides wait.",
        {"rollout/idle_share": "rollouts", "train/idle_share": "trainer"},
    ),
    ("Queue depth", "count", "Groups that wait to be trained.", {"queue/depth": "groups"}),
    (
        "Tokens per second",
        "count",
        "Sampled by the engine, by wall time and by the time it computed, and trained.",
        {
            "rollout/tokens_per_second": "sampled",
            DECODE_RATE: "sampled, while computing",
            "train/tokens_per_second": "trained",
        },
    ),
    ("Prefix cache", "share", "Prompt tokens that came from the cache.", {HIT_RATE: "hits"}),
    (
        "Decode stability",
        "number",
        "Standard deviation of the engine's tokens per second over its last windows, by their mean: 0 is "
        "steady. Waiting for tools is left out.",
        {DECODE_VARIATION: "variation"},
    ),
    (
        "Gap between tokens",
        "number",
        "Milliseconds between two tokens of a request, 99th percentile.",
        {GAP_P99: "p99"},
    ),
    (
        "Compliance",
        "share",
        "Completions under a constraint that are whole words of its language.",
        {COMPLIANCE: "compliant"},
    ),
)

_EMPTY = {"Compliance": "No data: no completion has ended under a constraint."}


def _over_time(view: RunView) -> list[Chart]:
    """Charts over the minutes that the run worked; pauses between its parts are left out."""
    moments: list[tuple[float, dict[str, float]]] = []
    marks: list[float] = []
    began: float | None = None
    last = before = 0.0
    incarnation = 0
    for logged in view.events:
        event = logged.event
        if logged.aside:
            continue
        if began is None:
            began = last = logged.wall
        if isinstance(event, RunStarted) and event.incarnation > incarnation:
            incarnation = event.incarnation
            before += last - began
            began = last = logged.wall
            marks.append(before / 60)
        last = max(last, logged.wall)  # a clock may be set back
        if isinstance(event, StepEnded | Metrics):
            values = event.metrics if isinstance(event, StepEnded) else event.values
            moments.append(((before + last - began) / 60, values))
    found = []
    for title, kind, note, names in _BY_TIME:
        told = [moment for moment in moments if any(name in moment[1] for name in names)]
        x, columns = _thinned(told, list(names))
        series = [
            Series(name=shown, values=column) for shown, column in zip(names.values(), columns, strict=True)
        ]
        empty = _EMPTY.get(title, "The run has not told yet.")
        chart = _chart(title, note, x, series, kind, axis="minutes", empty=empty)
        chart.marks = marks
        found.append(chart)
    return found


def _thinned(
    moments: Sequence[tuple[float, dict[str, float]]], names: Sequence[str]
) -> tuple[list[float], list[list[Number]]]:
    """At most `MOMENTS` points: means of neighbours."""
    width = max(1, math.ceil(len(moments) / MOMENTS))
    x: list[float] = []
    columns: list[list[Number]] = [[] for _ in names]
    for first in range(0, len(moments), width):
        part = moments[first : first + width]
        x.append(statistics.fmean(at for at, _ in part))
        for column, name in zip(columns, names, strict=True):
            told = [v for _, values in part if (v := _finite(values.get(name))) is not None]
            column.append(statistics.fmean(told) if told else None)
    return x, columns


def _warm(view: RunView) -> Chart:
    losses: dict[float, float] = {}
    for logged in view.events:
        if isinstance(logged.event, Metrics) and "warmstart/step" in logged.event.values:
            values = logged.event.values
            if math.isfinite(loss := values.get("warmstart/loss", math.nan)):
                losses[values["warmstart/step"]] = loss
    x = sorted(losses)
    series = [Series(name="loss", values=[losses[at] for at in x])]
    note = "Nats per token of the demonstrations, before reinforcement learning."
    return _chart("Warm start", note, x, series, "number", empty="This run had no warm start.")
