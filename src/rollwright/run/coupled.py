"""Coupled mode: one process, rollouts and training in turns, weights shared in memory.

Role: the same two sides as async mode, without processes, queue wait and staleness. Neighbours:
`rollout_side`, `trainer_side`. Invariant: the algorithm, the loss and the numbers of groups are those of
async mode; only the order differs.
"""

from __future__ import annotations

from rollwright.clock import SystemClock
from rollwright.engine.serve.scrape import scraped
from rollwright.events import EventLog
from rollwright.pool.base import WorkKind
from rollwright.run.folder import RunFolder
from rollwright.run.leases import leased
from rollwright.run.parts import build
from rollwright.run.rollout_side import opened
from rollwright.run.stop import Stop
from rollwright.run.trainer_side import TrainerSide
from rollwright.weights.in_process import InProcessChannel


async def work(folder: RunFolder, events: EventLog, stop: Stop) -> None:
    """The one process of a coupled run."""
    parts = build(folder, SystemClock())
    channel = InProcessChannel()
    kinds = (WorkKind.TRAINING, WorkKind.SAMPLING, WorkKind.SANDBOX)
    async with leased(parts.clock, events, stop, *kinds) as leases:
        lease = leases[WorkKind.TRAINING]
        trainer = TrainerSide(parts, channel, events, lease)
        await trainer.open()
        decoder = trainer.trainer.decoder
        async with (
            opened(parts, channel, decoder, events, leases, "coupled", rounds=True) as rollouts,
            scraped(rollouts.engine, parts.config.loop.metrics_port, parts.clock),
        ):
            if lease.revoked:
                return
            await rollouts.first_weights()
            await rollouts.measure("before")
            while trainer.step < parts.config.loop.steps and not lease.revoked:
                await rollouts.fill(parts.config.loop.groups)
                groups = await trainer.batch()
                if groups is None:
                    break
                trainer.train(groups)
                await rollouts.first_weights()
            if not lease.revoked:
                await rollouts.measure("after")
    parts.close()
