"""The supervised start: a fresh policy learns the tool format from scripted demonstrations, bad habits
included.

Role: demonstrations → rows → `Trainer.supervise`. Neighbours: the task set scripts, the template writes,
the trainer learns. Invariants: only what the assistant says is learnt; what a demonstration's tools answer
is what the real tools answer (tested); no demonstration is used twice, not in a warm start that was
interrupted either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from rollwright.agents.base import ScriptTemplate
from rollwright.agents.calls import render
from rollwright.errors import ConfigError
from rollwright.events import EventLog, Metrics
from rollwright.pool.base import Lease
from rollwright.run.parts import Parts
from rollwright.tasks.base import Demonstration
from rollwright.tools.registry import ToolRegistry
from rollwright.trainer.base import Trainer
from rollwright.types import Ints, Provenance, Row, Task, ToolSpec

SAVE_SECONDS = 30.0
"""Longest time between two checkpoints of a warm start."""

FIRST_TASK = 10_000_000
"""Demonstrations are drawn from train tasks of this number on; reinforcement learning starts at 0."""


class WarmStart:
    """One supervised phase."""

    def __init__(self, parts: Parts, trainer: Trainer, events: EventLog, lease: Lease) -> None:
        self.parts, self.trainer, self.events, self.lease = parts, trainer, events, lease
        self.registry = ToolRegistry.installed()

    async def run(self, save: Callable[[], None]) -> None:
        """The updates that are left, with progress. `save` makes a checkpoint: at the end, now and then on
        the way, and where the lease is revoked, which ends it early."""
        config, clock = self.parts.config.warmstart, self.parts.clock
        began, told, saved = clock.now(), float("-inf"), clock.now()
        first = self.trainer.supervised + 1
        for step in range(first, config.steps + 1):
            number = FIRST_TASK + (step - 1) * config.batch
            rows = [self.row(number + i) for i in range(config.batch)]
            report = self.trainer.supervise(rows, config.schedule.rate(step, config.steps))
            await asyncio.sleep(0)  # lets a revocation through
            now = clock.now()
            if self.lease.revoked or now - saved > SAVE_SECONDS or step == config.steps:
                saved = now
                save()
            if self.lease.revoked:
                return
            if now - told > self.parts.config.loop.report_seconds or step == config.steps:
                told = now
                self.events.emit(
                    Metrics(
                        process="trainer",
                        values={
                            "warmstart/step": float(step),
                            "warmstart/total": float(config.steps),
                            "warmstart/loss": report.metrics["loss"],
                            "warmstart/seconds": now - began,
                            "warmstart/seconds_left": (now - began)
                            / (step - first + 1)
                            * (config.steps - step),
                        },
                    )
                )
                self.events.flush()

    def row(self, number: int) -> Row:
        """Demonstration `number` as a row whose assistant tokens count as sampled.

        Raises:
            ConfigError: the task set has no script.
        """
        task = self.parts.tasks.task("train", number)
        demonstration = self.parts.tasks.demonstrate(task, number)
        if demonstration is None:
            raise ConfigError(
                f"tasks '{self.parts.tasks.name}' have no scripted demonstrations: set warmstart.steps = 0"
            )
        return demonstrated(task, demonstration, self.parts.template, self.registry.specs(task.tools))


def demonstrated(
    task: Task, demonstration: Demonstration, template: ScriptTemplate, specs: tuple[ToolSpec, ...]
) -> Row:
    """The row that an agent would have made which says exactly what `demonstration` says."""
    by_name = {spec.name: spec for spec in specs}
    pieces: list[tuple[Ints, Provenance]] = [(template.start(task.messages, specs), Provenance.PROMPT)]
    for call, observation in zip(demonstration.calls, demonstration.observations, strict=True):
        pieces.append((template.say_call(render(call, by_name[call.name])), Provenance.SAMPLED))
        pieces.append((template.observation([observation], closed=True), Provenance.TOOL))
    pieces.append((template.say_answer(demonstration.answer), Provenance.SAMPLED))
    tokens = np.concatenate([ids for ids, _ in pieces]).astype(np.int32)
    provenance = np.repeat([mark for _, mark in pieces], [len(ids) for ids, _ in pieces]).astype(np.uint8)
    return Row(tokens=tokens, provenance=provenance, logprobs=np.zeros(len(tokens), np.float32), spans=())
