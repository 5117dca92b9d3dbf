"""What a run looks like at this moment, computed from its events.

Role: folds events into the figures that people watch. Neighbours: `terminal` draws them; `events.Tail`
feeds them. Invariant: a figure that has no data is None, never 0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollwright.events import (
    Evaluated,
    Event,
    GroupEnded,
    Logged,
    Metrics,
    Noted,
    Resumed,
    RolloutEnded,
    RunStarted,
    StepEnded,
    WeightsPushed,
)

WINDOW = 256
"""Training rollouts over which live success and reward are averaged."""


@dataclass
class Figures:
    """The state of a run as its events tell it."""

    total_steps: int
    step: int = 0
    warm: int = 0
    warm_total: int = 0
    started: float | None = None
    first_step_wall: float | None = None
    first_step: int = 0
    last_wall: float | None = None
    groups_kept: int = 0
    groups_dropped: dict[str, int] = field(default_factory=dict)
    live: dict[str, float] = field(default_factory=dict)
    """Newest value of each metric, whichever process said it."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, mean reward of its groups, entropy)."""
    evaluations: list[Evaluated] = field(default_factory=list)
    told: bool = False
    """Whether this part of the run has done a piece of work: an update, a rollout, an evaluation."""
    evaluating: str = ""
    """The evaluation under way and how far it is: `after, sampled 120/256`; "" while none is."""
    notes: list[Noted] = field(default_factory=list)
    pushes: int = 0
    gap: float | None = None
    incarnation: int = 0
    seconds_before: float = 0.0
    """What the parts before this one took."""
    _values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def feed(self, logged: Logged) -> None:
        """Take one event."""
        event = logged.event
        if logged.aside:  # its times and rates are not the run's
            if isinstance(event, Evaluated):
                self.evaluations.append(event)
            return
        if isinstance(event, RunStarted) and event.incarnation > self.incarnation:
            self.part(event.incarnation)
        if self.started is None:
            self.started = logged.wall
        self.last_wall = max(logged.wall, self.last_wall or logged.wall)  # a clock may be set back
        self.told = self.told or _work(event)
        match event:
            case RolloutEnded(value=value, job="train") if value is not None:
                self._values.append(value)
            case GroupEnded(kept=True):
                self.groups_kept += 1
            case GroupEnded(reason=reason):
                self.groups_dropped[reason] = self.groups_dropped.get(reason, 0) + 1
            case Resumed(step=step):
                self.step = step
            case StepEnded(step=step, metrics=metrics):
                self._step(step, metrics, logged.wall)
            case Metrics(values=values, what=what) if what:
                done, total = values.get("evaluate/done", 0), values.get("evaluate/total", 0)
                self.evaluating = f"{what} {done:.0f}/{total:.0f}"
            case Metrics(values=values):
                self.live.update(values)
                self.warm = int(self.live.get("warmstart/step", self.warm))
                self.warm_total = int(self.live.get("warmstart/total", self.warm_total))
            case WeightsPushed(gap=gap):
                self.pushes += 1
                self.gap = max(gap, self.gap or 0.0)
            case Evaluated():
                self.evaluations.append(event)
                self.evaluating = ""
            case Noted():
                self.notes.append(event)
            case _:
                pass

    def _step(self, step: int, metrics: dict[str, float], wall: float) -> None:
        self.step = step
        self.live.update(metrics)
        if self.first_step_wall is None:
            self.first_step_wall, self.first_step = wall, step
        if "train/reward" in metrics and "train/entropy" in metrics:
            self.curve.append((step, metrics["train/reward"], metrics["train/entropy"]))

    def part(self, incarnation: int) -> None:
        """A part of the run begins that goes on from the last one: what was live is no more."""
        if incarnation == self.incarnation:
            return
        self.incarnation = incarnation
        self.seconds_before = self.seconds
        self.started = self.last_wall = self.first_step_wall = None
        self.live.clear()
        self.told, self.evaluating = False, ""
        self.notes.clear()

    @property
    def measured(self) -> bool:
        """Whether the policy after the last step was measured: the run's end."""
        ends = (e for e in self.evaluations if (e.label, e.mode) == ("after", "greedy"))
        return any(e.step is not None and e.step >= self.total_steps for e in ends)

    @property
    def seconds(self) -> float:
        """Wall seconds of all parts so far, without the pauses between them."""
        if self.started is None or self.last_wall is None:
            return self.seconds_before
        return self.seconds_before + self.last_wall - self.started

    @property
    def success(self) -> float | None:
        """Mean reward of the last `WINDOW` training rollouts; None before the first."""
        return sum(self._values) / len(self._values) if self._values else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the pace of the steps so far; None before the second step."""
        if self.first_step_wall is None or self.last_wall is None or self.step <= self.first_step:
            return None
        pace = (self.last_wall - self.first_step_wall) / (self.step - self.first_step)
        return max(0.0, pace * (self.total_steps - self.step))


def _work(event: Event) -> bool:
    """Whether an event tells of work done, and not of waiting for the first."""
    if isinstance(event, Metrics):
        return bool(event.what) or "warmstart/step" in event.values
    return isinstance(event, RolloutEnded | GroupEnded | StepEnded | Evaluated)
