"""A run of a configuration in this process, in coupled mode."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.events import EventLog
from rollwright.run import coupled
from rollwright.run.begin import begin
from rollwright.run.folder import RunFolder
from rollwright.run.stop import Stop

TINY = (
    "mode=coupled",
    "model={dim=32, layers=1, heads=2, kv_heads=1, ffn=32}",
    "warmstart.steps=0",
    "loop={steps=0, report_seconds=0.02}",
    "evaluation={tasks=12, concurrency=12}",
    "rollout.concurrency=12",
)
"""An evaluation of a policy with random weights, before and after nothing."""


async def run(folder: Path, *overrides: str) -> RunFolder:
    """The folder of a run with `TINY` and `overrides`, made and worked through."""
    made = begin(load([], [*TINY, f"folder={folder}", *overrides]))
    events = EventLog(made.events("coupled"), SystemClock())
    try:
        await coupled.work(made, events, Stop())
    finally:
        events.close()
    return made


def ran(folder: Path, *overrides: str) -> RunFolder:
    """As `run`, for tests without an event loop."""
    return asyncio.run(run(folder, *overrides))
