"""Evaluation of a finished run's newest checkpoint.

Role: `rollwright eval`. Neighbours: the rollout side does the work. Invariant: the run folder keeps its
queue and ledger as they are; the evaluation's own rollouts are counted in a ledger in memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import torch

from rollwright.buffer.memory import MemoryStore
from rollwright.clock import Clock
from rollwright.errors import ConfigError
from rollwright.events import Evaluated, EventLog
from rollwright.pool.base import WorkKind
from rollwright.run.folder import RunFolder
from rollwright.run.leases import leased
from rollwright.run.parts import build
from rollwright.run.preflight import evaluation, taskset
from rollwright.run.rollout_side import opened
from rollwright.run.stop import Stop
from rollwright.trainer.torch_trainer import TorchTrainer
from rollwright.weights.in_process import InProcessChannel


def evaluate(folder: RunFolder, overrides: list[str], clock: Clock) -> list[Evaluated]:
    """Success, sampled and greedy, of the newest committed checkpoint.

    Raises:
        ConfigError: no run folder, nothing committed yet, or a wrong override.
    """
    torch.set_num_threads(1)
    return asyncio.run(_evaluate(folder, overrides, clock))


async def _evaluate(folder: RunFolder, overrides: list[str], clock: Clock) -> list[Evaluated]:
    config = evaluation(folder.load(), overrides)
    if not folder.store.is_file():
        raise ConfigError(
            f"{folder.path}: no checkpoint: {folder.store.name} is missing (a run with queue.type = 'memory' "
            "keeps none, one that never started has none)"
        )
    parts = build(folder, clock)
    last = parts.store.last_commit()
    parts.store.close()
    if last is None:
        raise ConfigError(f"{folder.path}: no checkpoint: the warm start did not finish")
    # The tokenizer stays that of the run: other tasks are asked in the words that the policy knows.
    parts = replace(
        parts,
        config=config,
        tasks=taskset(config),
        store=MemoryStore(config.queue.capacity, run=folder.id),
    )
    decoder = parts.decoder()
    trainer = TorchTrainer(decoder, config.trainer)
    trainer.restore(parts.blobs("checkpoints").get(last.checkpoint))
    channel = InProcessChannel()
    channel.publish(last.version, trainer.weights())
    events = EventLog(folder.events("evaluation"), clock)
    kinds = (WorkKind.SAMPLING, WorkKind.SANDBOX)
    try:
        async with (
            leased(clock, events, Stop(), *kinds) as leases,
            opened(parts, channel, decoder, events, leases, "evaluation") as side,
        ):
            await side.first_weights()
            return await side.evaluate(str(last.version), example=False)
    finally:
        events.close()
