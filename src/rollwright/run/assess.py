"""Tries a policy on train tasks before anything is trained on them.

Role: `rollwright assess`: the scripts first, then a policy, tries, figures. Neighbours: `rehearse` looks at
the tasks themselves, the rollout side and the trainer side do the work, `evals.feasibility` computes,
`monitor.evidence` shows. Invariants: no run folder is made or changed, everything lies in a scratch
folder that is gone afterwards; the tries are made as training would make them, and none of them is trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollwright.clock import Clock
from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.evals.caps import caps, use
from rollwright.evals.feasibility import Feasibility, Plan, Trial, feasibility, transfer
from rollwright.events import EventLog, Metrics, RolloutEnded, Tail
from rollwright.monitor.evidence import evidence
from rollwright.pool.base import WorkKind
from rollwright.run.begin import begin
from rollwright.run.evaluation import newest
from rollwright.run.folder import RunFolder
from rollwright.run.leases import leased
from rollwright.run.parts import build
from rollwright.run.preflight import sandboxes, taskset
from rollwright.run.rehearse import Faulty, on_paper, played
from rollwright.run.rollout_side import RolloutSide, opened
from rollwright.run.stop import Stop
from rollwright.run.trainer_side import TrainerSide
from rollwright.tasks.base import Warns
from rollwright.tasks.elsewhere import differing, movable
from rollwright.types import Batch, Group, Sampling, Scored, Task
from rollwright.weights.in_process import InProcessChannel

Progress = Callable[[str], None]

TOLD_SECONDS = 2.0
"""Pace of the progress."""
HELDOUT_TRIES = 2
"""Rollouts of each held-out task."""
ELSEWHERE = 20
"""Tasks of each split that are drawn in another interpreter too."""


def assess(
    config: RunConfig,
    run: RunFolder | None,
    *,
    tasks: int = 64,
    tries: int = 8,
    progress: Progress,
    clock: Clock,
) -> Feasibility:
    """Play the scripts of `config`; then try its first `tasks` train tasks, `tries` times each, and held-out
    ones, with the newest checkpoint of `run`, or with a fresh policy after the warm start that `config` asks
    for.

    Raises:
        Faulty: the tasks themselves are wrong; nothing was tried.
        ConfigError: contradictions in `config`, or a run without a checkpoint.
    """
    if tasks < 1 or tries < 2:
        raise ConfigError(f"{tasks} tasks, {tries} tries: expected at least 1 task and 2 tries each")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollwright-assess-") as scratch:
        given: dict[str, Any] = {"folder": scratch, "name": "assess"}
        if run is not None:
            stored = run.load()
            none = stored.warmstart.model_copy(update={"steps": 0})
            given |= {"model": stored.model, "warmstart": none}
        config = config.model_copy(update=given)
        warnings = asyncio.run(_rehearse(config, Path(scratch) / "rehearsal", clock))
        folder = begin(config)
        if run is not None and run.tokenizer.is_file():  # other tasks are asked in the words the policy knows
            folder.tokenizer.write_text(run.tokenizer.read_text())
        found = asyncio.run(_assess(folder, run, tasks, tries, progress, clock))
        return replace(found, warnings=(*warnings, *found.warnings))


async def _rehearse(config: RunConfig, folder: Path, clock: Clock) -> list[str]:
    """Look at the tasks themselves; what is no error but worth a word.

    Raises:
        Faulty: they are wrong.
    """
    tasks = taskset(config)
    sandboxes(config)
    paper = on_paper(config, tasks)
    if problems := paper.lines():
        raise Faulty(tasks.name, problems)
    count = min(ELSEWHERE, config.evaluation.tasks)
    if movable(config.tasks) and (other := await asyncio.to_thread(differing, config.tasks, count)):
        raise Faulty(
            tasks.name,
            [
                f"task '{other[0]}' is another one in another process ({len(other)} of {2 * count} are): "
                "something is drawn past `rng`, or in the order of a set; sort sets before you draw from them"
            ],
        )
    folder.mkdir()
    live = await played(config, tasks, folder, clock)
    if problems := live.lines():
        raise Faulty(tasks.name, problems)
    told = tasks.warnings() if isinstance(tasks, Warns) else ()
    return [*told, *paper.warnings, *live.warnings]


async def _assess(
    folder: RunFolder, run: RunFolder | None, count: int, tries: int, progress: Progress, clock: Clock
) -> Feasibility:
    events = EventLog(folder.events("assess"), clock)
    parts = build(folder, clock)
    config = parts.config
    channel = InProcessChannel()
    total = count * tries + min(count, config.evaluation.tasks) * HELDOUT_TRIES
    telling = asyncio.create_task(_tell(folder.path, total, progress, clock))
    kinds = (WorkKind.TRAINING, WorkKind.SAMPLING, WorkKind.SANDBOX)
    try:
        async with leased(clock, events, Stop(), *kinds) as leases:
            trainer = TrainerSide(parts, channel, events, leases[WorkKind.TRAINING])
            if run is not None:
                trainer.trainer.restore(newest(run, run.load(), clock)[1])
            await trainer.open()
            async with opened(parts, channel, trainer.trainer.decoder, events, leases, "assess") as rollouts:
                await rollouts.first_weights()
                tasks = _tasks(parts.tasks.task, count)
                rollout = config.rollout
                began = clock.now()
                scored = await rollouts.factory.evaluate(
                    [task for task in tasks for _ in range(tries)],
                    Sampling(temperature=rollout.temperature, top_p=rollout.top_p, seed=config.seed),
                    label="assess",
                )
                seconds = clock.now() - began
                heldout = await _heldout(rollouts, count)
            groups = [scored[i : i + tries] for i in range(0, len(scored), tries)]
            plan = Plan(
                group_size=rollout.group_size,
                groups=config.loop.groups,
                steps=config.loop.steps,
                overlap=config.mode == "async",
                sampling_seconds=seconds,
                training_seconds=_step_seconds(trainer, tasks, groups, clock),
            )
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling
        events.close()
        parts.close()
    trials = [[trial(each) for each in group] for group in groups]
    least = min(rollout.min_members, tries)
    found = feasibility(trials, plan, success=rollout.success, least=least)
    shown = list(zip([task for task in tasks for _ in range(tries)], scored, strict=True))
    used = caps(use(task, each.rollout) for task, each in shown)
    found = replace(found, evidence=tuple(evidence(shown, rollout.success)), caps=tuple(used))
    return transfer(found, [[trial(each) for each in group] for group in heldout], rollout.success)


async def _heldout(side: RolloutSide, count: int) -> list[list[Scored]]:
    """Tries at held-out tasks, to see whether what was learnt carries over."""
    config = side.parts.config
    tasks = [side.parts.tasks.task("heldout", n) for n in range(min(count, config.evaluation.tasks))]
    rollout = config.rollout
    scored = await side.factory.evaluate(
        [task for task in tasks for _ in range(HELDOUT_TRIES)],
        Sampling(temperature=rollout.temperature, top_p=rollout.top_p, seed=config.seed),
        label="assess-heldout",
    )
    return [scored[i : i + HELDOUT_TRIES] for i in range(0, len(scored), HELDOUT_TRIES)]


def _tasks(task: Callable[..., Task], count: int) -> list[Task]:
    """The first train tasks that differ; fewer where the set repeats itself."""
    found: dict[str, Task] = {}
    for number in range(count):
        made = task("train", number)
        found.setdefault(made.id, made)
    return list(found.values())


def _step_seconds(
    trainer: TrainerSide, tasks: Sequence[Task], groups: Sequence[Sequence[Scored]], clock: Clock
) -> float | None:
    """Wall seconds of one optimiser step of `loop.groups` groups, measured on those of the tries that have
    signal; None where none has. The weights that it makes are thrown away."""
    wanted, samples, used = trainer.parts.config.loop.groups, [], 0
    for task, members in zip(tasks, groups, strict=True):
        kept = tuple(member for member in members if member.score.value is not None)
        made = trainer.algorithm.samples(Group(id=task.id, task=task.id, members=kept)) if kept else []
        if any(sample.advantages.any() for sample in made):
            samples += made
            used += 1
        if used == wanted:
            break
    if not used:
        return None
    seconds = []
    for _ in range(2):  # the first one pays for what is set up once
        began = clock.now()
        trainer.trainer.step(Batch(samples=tuple(samples), version=trainer.version))
        seconds.append(clock.now() - began)
    return min(seconds) * wanted / used


def trial(scored: Scored) -> Trial:
    """What the arithmetic asks of a rollout."""
    rollout, state, states = scored.rollout, hashlib.blake2b(digest_size=8), []
    for turn in rollout.turns[:-1]:
        for call, result in zip(turn.calls, turn.results, strict=False):
            state.update(repr((call.name, call.arguments, result.content)).encode("utf-8", "replace"))
        states.append(state.hexdigest())
    return Trial(
        value=scored.score.value,
        tokens=sum(int(row.sampled.sum()) for row in rollout.rows),
        turns=len(rollout.turns),
        seconds=rollout.seconds,
        states=tuple(states),
    )


async def _tell(folder: Path, total: int, progress: Progress, clock: Clock) -> None:
    """Say how far the warm start and the tries are, until cancelled."""
    tail, done, warm = Tail(folder), 0, ""
    while True:
        await clock.sleep(TOLD_SECONDS)
        before = (done, warm)
        for logged in tail.read():
            event = logged.event
            if isinstance(event, RolloutEnded):
                done += 1
            elif isinstance(event, Metrics) and "warmstart/step" in event.values:
                values = event.values
                warm = f"warm start {values['warmstart/step']:.0f}/{values['warmstart/total']:.0f}"
        if (done, warm) != before:
            progress(f"rollouts {done}/{total}" if done else warm)
