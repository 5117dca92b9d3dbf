"""The trainer's side of a run: warm start or resume, then batch → step → commit → publish.

Role: owns the trainer, the lineage and the consumed position. Neighbours: the store gives groups, the
weight channel takes versions. Invariants: the checkpoint, the position and the dispositions commit
together, before the new version is published; lag is bounded when the batch is assembled; nothing waits
without a deadline.

waits for: groups in the store · unblocked by: the rollout side's `put`, the deadline `loop.group_wait`, or
a revoked lease
"""

from __future__ import annotations

import asyncio

from rollwright.algo.base import Algorithm
from rollwright.buffer.base import Commit, Drop
from rollwright.clock import SystemClock
from rollwright.errors import DeadlineExceeded
from rollwright.events import EventLog, Resumed, StepEnded
from rollwright.plugins import buildable
from rollwright.pool.base import Lease, WorkKind
from rollwright.run.folder import RunFolder
from rollwright.run.leases import leased
from rollwright.run.parts import Parts, build
from rollwright.run.stop import Stop
from rollwright.run.warmstart import WarmStart
from rollwright.trainer.staleness import fresh
from rollwright.trainer.torch_trainer import TorchTrainer
from rollwright.types import Batch, Disposition, Group, Lineage, PolicyVersion
from rollwright.weights.base import WeightChannel

WAIT_SECONDS = 0.01
"""Pause between two looks into the queue."""


class TrainerSide:
    """Everything between a queue of groups and published weights."""

    def __init__(self, parts: Parts, channel: WeightChannel, events: EventLog, lease: Lease) -> None:
        self.parts, self.channel, self.events, self.lease = parts, channel, events, lease
        self.trainer = TorchTrainer(parts.decoder(), parts.config.trainer)
        self.algorithm: Algorithm = buildable(parts.config.algorithm, "algorithm").build()
        self.lineage: Lineage = parts.store.lineage()
        self.step = 0
        self.position = 0
        self._pending: list[Group] = []
        self._drops: list[Drop] = []
        self._waited = 0.0
        self._checkpoints = parts.blobs("checkpoints")

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights now."""
        return self.lineage.version(self.step)

    async def open(self) -> None:
        """Take up the last commit, finish the warm start where it isn't; then publish."""
        last = self.parts.store.last_commit()
        if last is not None:
            self.trainer.restore(self._checkpoints.get(last.checkpoint))
            self.step, self.position = last.version.step, last.position
            self.events.emit(Resumed(step=self.step, version=str(self.version)))
            self.events.flush()
        if self.step == 0:
            warm = WarmStart(self.parts, self.trainer, self.events, self.lease)
            await warm.run(save=lambda: self._commit(()))
            if self.lease.revoked:
                return
            if self.parts.store.last_commit() is None:  # no warm start at all
                self._commit(())
        self._publish()

    async def batch(self) -> list[Group] | None:
        """The groups of one step, none of them too stale; None when the lease was revoked.

        Raises:
            DeadlineExceeded: no full batch within `loop.group_wait` seconds.
        """
        config, clock = self.parts.config, self.parts.clock
        began = clock.now()
        while not self.lease.revoked:
            self._look()
            if len(self._pending) >= config.loop.groups:
                taken, self._pending = (
                    self._pending[: config.loop.groups],
                    self._pending[config.loop.groups :],
                )
                self._waited = clock.now() - began
                return taken
            if clock.now() - began > config.loop.group_wait:
                raise DeadlineExceeded(
                    f"waiting for {config.loop.groups} groups ({len(self._pending)} there; "
                    "see the rollout side's log)",
                    config.loop.group_wait,
                )
            await clock.sleep(WAIT_SECONDS)
        return None

    def _look(self) -> None:
        """Read what is new in the queue and drop what is stale by now."""
        missing = self.parts.config.loop.groups - len(self._pending)
        if missing > 0:
            for queued in self.parts.store.read(self.position, missing):
                self.position = queued.position
                self._pending.append(queued.group)
        self._pending, drops = fresh(
            self._pending, self.lineage, self.version, self.parts.config.trainer.max_lag
        )
        self._drops.extend(drops)

    def train(self, groups: list[Group]) -> None:
        """One optimiser step on `groups`, committed and published."""
        began = self.parts.clock.now()
        samples = [sample for group in groups for sample in self.algorithm.samples(group)]
        lags = [self.lineage.lag(self.version, group.oldest) or 0 for group in groups if group.oldest]
        loop = self.parts.config.loop
        rate = loop.schedule.rate(self.step + 1, loop.steps)
        report = self.trainer.step(Batch(samples=tuple(samples), version=self.version), rate)
        self.step += 1
        self.parts.archive.trained(self.version, samples)
        self._commit(groups)
        self._report(groups, report.metrics, lags, self.parts.clock.now() - began)
        self._publish()

    def _commit(self, groups: list[Group] | tuple[()]) -> None:
        trained, unscorable = [], []
        for member in (member for group in groups for member in group.members):
            rollout = member.rollout.identity.rollout
            if member.score.value is None:
                unscorable.append(
                    Drop(rollout=rollout, disposition=Disposition.UNSCORABLE, reason=member.score.reason)
                )
            else:
                trained.append(rollout)
        previous = self.parts.store.last_commit()
        checkpoint = self._checkpoints.put(self.trainer.state())
        self.parts.store.commit(
            Commit(
                version=self.version,
                position=self.position,
                trained=tuple(trained),
                dropped=(*self._drops, *unscorable),
                checkpoint=checkpoint,
            )
        )
        self._drops.clear()
        if previous:
            self._checkpoints.keep(frozenset({checkpoint, previous.checkpoint}))

    def _publish(self) -> None:
        prompt = self.parts.template.start(self.parts.tasks.task("heldout", 0).messages, ())
        self.channel.publish(self.version, self.trainer.weights(), self.trainer.probe(prompt))

    def _report(
        self, groups: list[Group], metrics: dict[str, float], lags: list[int], seconds: float
    ) -> None:
        values = [m.score.value for g in groups for m in g.members if m.score.value is not None]
        told = {f"train/{name}": value for name, value in metrics.items()}
        told |= {
            "train/reward": sum(values) / len(values),
            "train/idle_share": self._waited / (self._waited + seconds),
            "train/tokens_per_second": metrics["tokens"] / seconds,
            "train/seconds": seconds,
            "train/waited": self._waited,
            "queue/depth": float(self.parts.store.depth()),
        }
        if lags:
            told |= {"train/lag_mean": sum(lags) / len(lags), "train/lag_max": float(max(lags))}
        self.events.emit(StepEnded(step=self.step, incarnation=self.version.incarnation, metrics=told))
        self.events.flush()


async def work(folder: RunFolder, events: EventLog, stop: Stop) -> None:
    """The trainer process of an async run."""
    parts = build(folder, SystemClock())
    async with leased(parts.clock, events, stop, WorkKind.TRAINING) as leases:
        lease = leases[WorkKind.TRAINING]
        side = TrainerSide(parts, parts.file_channel(), events, lease)
        await side.open()
        while side.step < parts.config.loop.steps and not lease.revoked:
            groups = await side.batch()
            if groups is None:
                break
            side.train(groups)
            await asyncio.sleep(0)  # lets a revocation through
    parts.close()
