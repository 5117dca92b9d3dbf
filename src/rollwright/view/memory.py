"""Memory of keys and values, planned and measured, and how long rollouts really got.

Role: two small sections of the report. Neighbours: `folder` gives the run, `evals.caps` computes the limits.
Invariants: what has no data is None or empty; only training rollouts count for limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollwright.engine.kv.sizes import told
from rollwright.evals.caps import Cap, advice, settings, use
from rollwright.evals.caps import caps as learned
from rollwright.events import Metrics
from rollwright.view.folder import RunView

ROLLOUTS = 2000
"""Newest training rollouts that the limits are learned from."""


@dataclass(frozen=True)
class Memory:
    """Bytes of keys and values: planned at the start, and the most that was measured."""

    planned: float
    measured: float | None

    @property
    def share(self) -> float | None:
        """Measured of planned."""
        return None if self.measured is None or not self.planned else self.measured / self.planned

    @property
    def text(self) -> str:
        """Both, for a person."""
        plan = f"{told(self.planned)} planned at most"
        if self.measured is None or self.share is None:
            return f"{plan}; nothing was measured"
        return f"{told(self.measured)} measured at most, {plan}: {100 * self.share:.1f} %"


@dataclass(frozen=True)
class Caps:
    """Limits learned from what rollouts used, each with what to do; and the keys that take them over."""

    lines: list[tuple[Cap, str]]
    settings: list[str]


def memory(view: RunView) -> Memory | None:
    """Of the newest part of the run that planned; None where another engine says, or an older run told
    nothing."""
    planned: float | None = None
    measured: float | None = None
    for logged in view.events:
        if logged.aside or not isinstance(logged.event, Metrics):
            continue
        values = logged.event.values
        if "engine/kv_planned" in values:
            planned, measured = values["engine/kv_planned"], None
        if "engine/kv_bytes" in values:
            measured = max(measured or 0.0, values["engine/kv_bytes"])
    return None if planned is None else Memory(planned, measured)


def caps(view: RunView) -> Caps:
    """What the newest training rollouts used of their tasks' limits."""
    if view.archive is None:
        return Caps([], [])
    newest = [line.rollout for line in view.lines if line.job == "train"][-ROLLOUTS:]
    found = learned(use(kept.task, kept.scored.rollout) for _, kept, _ in view.archive.whole(newest))
    return Caps([(cap, advice(cap)) for cap in found], settings(found))
