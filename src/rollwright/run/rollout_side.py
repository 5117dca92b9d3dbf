"""The rollout side of a run: engine, sandboxes and factory; groups into the queue, weights out of the
channel.

Role: makes rollouts with the newest weights. Neighbours: the store takes groups, the weight channel gives
versions. Invariants: an engine whose weights differ from the trainer's gets no traffic; a full queue stops
new groups; every rollout has its disposition when this side ends.

waits for: first weights, room in the queue · unblocked by: the trainer's publish and commit, a deadline, or
a revoked lease
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing

from msgspec.structs import replace

from rollwright.agents.probe import verdict
from rollwright.archive.reader import opened as opened_archive
from rollwright.buffer.base import Drop, Store, put_when_room
from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.serve.scrape import scraped
from rollwright.errors import ConfigError, DeadlineExceeded, NoSignal
from rollwright.evals.statistics import wilson
from rollwright.events import Evaluated, EventLog, Metrics, Noted, WeightsPushed, read_events
from rollwright.guard.audit import AuditLog
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.model.decoder import Decoder
from rollwright.monitor.engine import told as engine_told
from rollwright.monitor.evidence import evidence
from rollwright.monitor.transcript import transcript
from rollwright.plugins import buildable
from rollwright.pool.base import Lease, WorkKind
from rollwright.rollout.base import GroupReport
from rollwright.rollout.factory import RolloutFactory
from rollwright.rollout.groups import next_number, number_of
from rollwright.rollout.rounds import Rounds
from rollwright.run.begin import incarnation
from rollwright.run.derived import admitted, planned
from rollwright.run.device import device, placed
from rollwright.run.folder import RunFolder
from rollwright.run.leases import leased
from rollwright.run.parts import Parts, build
from rollwright.run.stop import Stop
from rollwright.sandbox.base import SandboxProvider
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.trainer.signal import SignalGuard
from rollwright.types import Disposition, Identity, PolicyVersion, Sampling, Scored, Task, WeightsRef
from rollwright.weights.base import WeightChannel

Leases = Mapping[WorkKind, Lease]

LOOK_BACK = 20_000
"""Started rollouts among which the newest task number is looked for first; far more than are in flight."""

EVIDENCE = 256
"""Rollouts that the error of a run without signal is about."""

POLL_SECONDS = 0.05
"""Pause between two looks for new weights."""

PROGRESS_SECONDS = 0.5
"""Pace at which an evaluation tells how far it is."""


class RolloutSide:
    """Everything between a task number and a scored group."""

    def __init__(
        self,
        parts: Parts,
        channel: WeightChannel,
        events: EventLog,
        lease: Lease,
        engine: Engine,
        factory: RolloutFactory,
    ) -> None:
        self.parts, self.channel, self.events, self.lease = parts, channel, events, lease
        self.engine, self.factory = engine, factory
        self.version: PolicyVersion | None = None
        self.incarnation = incarnation(parts.store)
        self.numbers = itertools.count(_next_number(parts.store))
        self.signal = SignalGuard()

    async def take(self, ref: WeightsRef) -> None:
        """Give the engine the weights of `ref` and check them against the probe.

        Raises:
            WeightMismatch: they are not the trainer's; the engine stays paused.
        """
        began = self.parts.clock.now()
        gap = await self.engine.update(self.channel.fetch(ref), ref.version, ref.probe)
        self.version = ref.version
        self.events.emit(
            WeightsPushed(
                version=str(ref.version), digest=ref.digest, gap=gap, seconds=self.parts.clock.now() - began
            )
        )

    async def first_weights(self) -> None:
        """Wait for and take the first version of this incarnation; the warm start comes before it.

        Raises:
            DeadlineExceeded: none within `loop.start_wait` seconds.
        """
        clock, seconds = self.parts.clock, self.parts.config.loop.start_wait
        began = clock.now()
        while not self.lease.revoked:
            ref = self.channel.latest()
            if ref is not None and ref.version.incarnation >= self.incarnation:
                return await self.take(ref)
            if clock.now() - began > seconds:
                raise DeadlineExceeded("waiting for the first weights, which the warm start makes", seconds)
            await clock.sleep(POLL_SECONDS)

    async def follow(self, last_step: int) -> None:
        """Take every new version until the one of `last_step`, or until the lease is revoked."""
        while not self.lease.revoked and (self.version is None or self.version.step < last_step):
            ref = self.channel.latest()
            if ref is not None and ref.version != self.version:
                await self.take(ref)
            await self.parts.clock.sleep(POLL_SECONDS)

    async def produce(self) -> None:
        """Make groups and queue those with signal, each as soon as it is done, until cancelled or revoked."""
        async with aclosing(self._made(self.numbers)) as reports:
            async for report in reports:
                await self._queue(report)

    async def fill(self, wanted: int) -> None:
        """Make groups until `wanted` with signal are queued, or the lease is revoked. They are queued in the
        order of their tasks, however long each took, so that a run repeats."""
        kept = 0
        while kept < wanted and not self.lease.revoked:
            waiting: list[GroupReport] = []
            try:
                async with aclosing(self._made(itertools.islice(self.numbers, wanted - kept))) as reports:
                    async for report in reports:
                        waiting.append(report)
                waiting = [report for report in waiting if report.group is not None]
                waiting.sort(key=lambda report: number_of(report.group.id if report.group else ""))
                while waiting:
                    await self._queue(waiting.pop(0))
                    kept += 1
            finally:
                left = [m for report in waiting if report.group for m in report.group.members]
                self._surplus([member.rollout.identity.rollout for member in left])

    async def _made(self, numbers: Iterator[int]) -> AsyncGenerator[GroupReport, None]:
        """Groups of the tasks `numbers`; their ids never repeat those of an earlier incarnation."""
        async with aclosing(self.factory.groups(numbers, prefix=f"{self.incarnation}-g")) as reports:
            async for report in reports:
                try:
                    warning = self.signal.check(self.factory.stats())
                except NoSignal as error:
                    for line in self._evidence():
                        error.add_note(line)
                    raise
                if warning:
                    self.events.emit(Noted(level="warning", text=warning))
                yield report

    def _evidence(self) -> list[str]:
        """How the last training rollouts ended, and what came of their calls."""
        self.parts.archive.flush()
        newest = [each.rollout for each in self.parts.store.newest(EVIDENCE) if each.job == "train"]
        with closing(opened_archive(self.parts.folder.rollouts)) as archive:
            tried = [(kept.task, kept.scored) for _, kept, _ in archive.whole(newest)]
        lines = evidence(tried, self.parts.config.rollout.success)
        return list(itertools.takewhile(lambda line: not line.startswith("one that failed"), lines))

    async def _queue(self, report: GroupReport) -> None:
        """Put a group that was kept into the queue, waiting for room."""
        if report.group is None:
            return
        wait = self.parts.config.loop.group_wait
        try:
            await put_when_room(self.parts.store, report.group, self.parts.clock, wait)
        except (DeadlineExceeded, asyncio.CancelledError):
            self._surplus([m.rollout.identity.rollout for m in report.group.members])
            raise

    def _surplus(self, rollouts: list[str]) -> None:
        self.parts.store.drop(
            [Drop(rollout=r, disposition=Disposition.SURPLUS, reason="made but not needed") for r in rollouts]
        )

    async def measure(self, label: str) -> None:
        """Evaluate the policy as `label`, unless that was done: "before" is the policy before any step,
        "after" the one after the last."""
        step = self.version.step if self.version else 0
        told = [e.event for e in read_events(self.parts.folder.path) if isinstance(e.event, Evaluated)]
        if (label, "greedy", step) in [(e.label, e.mode, e.step) for e in told]:
            return
        if label == "before" and step > 0:
            if not any(e.label == label for e in told):
                text = "what the policy could do before was not measured"
                self.events.emit(Noted(level="warning", text=text))
            return
        await self.evaluate(label)

    async def evaluate(self, label: str, *, name: str | None = None, example: bool = True) -> list[Evaluated]:
        """Success on held-out tasks, sampled and greedy; with `example` a transcript of one rollout stays
        in the folder. Stops early where the lease is revoked.

        `name` is what the ids of its rollouts begin with, the incarnation and `label` by default; no other
        evaluation of the run may have it.
        """
        results = []
        config = self.parts.config
        tasks = [self.parts.tasks.task("heldout", i) for i in range(config.evaluation.tasks)]
        for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            begun = f"{name or f'{self.incarnation}-{label}'}-{mode}"
            scored = await self.factory.evaluate(
                tasks,
                Sampling(temperature=temperature, seed=config.seed),
                label=begun,
                concurrency=_at_once(self.parts, config.evaluation.concurrency),
                progress=self._progress(f"{label}, {mode}", len(tasks)),
            )
            if self.lease.revoked:  # cut short: it measured nothing
                break
            measured = evaluated(label, mode, scored, config.rollout.success)
            if self.version is not None:
                measured = replace(
                    measured, step=self.version.step, incarnation=self.version.incarnation, rollouts=begun
                )
            results.append(measured)
            self.events.emit(results[-1])
            self.events.flush()
            if mode == "sampled" and example:
                text = f"{label}\n{_example(tasks, scored)}"
                self.parts.folder.example.write_text(text, encoding="utf-8", errors="replace")
        return results

    def _progress(self, what: str, total: int) -> Callable[[int], None]:
        """Tells how many of an evaluation's tasks are done, at a steady pace."""
        clock, told = self.parts.clock, -math.inf

        def tell(done: int) -> None:
            nonlocal told
            if done < total and clock.now() - told < PROGRESS_SECONDS:
                return
            told = clock.now()
            values = {"evaluate/done": float(done), "evaluate/total": float(total)}
            self.events.emit(Metrics(process="rollouts", values=values, what=what))
            self.events.flush()

        return tell

    async def report(self) -> None:
        """Live figures, until cancelled."""
        clock, seconds = self.parts.clock, self.parts.config.loop.report_seconds
        before, stats = await self.engine.health(), self.factory.stats()
        then = clock.now()
        while True:
            await clock.sleep(seconds)
            health, now, fresh_stats = await self.engine.health(), clock.now(), self.factory.stats()
            values = {
                "rollout/tokens_per_second": (health.sampled_tokens - before.sampled_tokens) / (now - then),
                "rollout/idle_share": min(1.0, (health.idle_seconds - before.idle_seconds) / (now - then)),
                "rollout/voided": float(fresh_stats.voided),
                "rollout/calls_per_second": (fresh_stats.calls - stats.calls) / (now - then),
                "queue/depth": float(self.parts.store.depth()),
                **engine_told(health, before),
            }
            if health.kv_bytes:
                values["engine/kv_bytes"] = float(health.kv_bytes)
            self.events.emit(Metrics(process="rollouts", values=values))
            self.events.flush()
            before, stats, then = health, fresh_stats, now


def evaluated(label: str, mode: str, scored: list[Scored], success: float) -> Evaluated:
    """Share of values from `success` on, with its 95 % Wilson interval over the scorable rollouts; the
    others are counted apart."""
    values = [s.score.value for s in scored if s.score.value is not None]
    wins = sum(value >= success for value in values)
    low, high = wilson(wins, len(values))
    sampled = sum(int(row.sampled.sum()) for s in scored for row in s.rollout.rows)
    return Evaluated(
        label=label,
        mode=mode,
        successes=wins,
        trials=len(values),
        low=low,
        high=high,
        metrics={
            "unscorable": float(len(scored) - len(values)),
            "turns": sum(len(s.rollout.turns) for s in scored) / len(scored),
            "tokens": sampled / len(scored),
        },
    )


def _example(tasks: list[Task], scored: list[Scored]) -> str:
    best = max(range(len(scored)), key=lambda i: (scored[i].score.value or 0.0, len(scored[i].rollout.turns)))
    return transcript(tasks[best], scored[best])


@asynccontextmanager
async def opened(
    parts: Parts,
    channel: WeightChannel,
    decoder: Decoder,
    events: EventLog,
    leases: Leases,
    process: str,
    *,
    rounds: bool = False,
) -> AsyncIterator[RolloutSide]:
    """A rollout side with its engine and sandboxes running; everything is closed on the way out. In `rounds`
    it repeats exactly."""
    config, clock = parts.config, parts.clock
    async with AsyncExitStack() as stack:
        version = parts.store.lineage().version(0)
        engine = buildable(config.engine, "engine").build(
            model=placed(decoder, device(config.engine)),
            version=version,
            clock=clock,
            events=events,
            lease=leases[WorkKind.SAMPLING],
            vocabulary=parts.codec.vocabulary(),
        )
        engine = Rounds(engine) if rounds else engine
        sandboxes = await _sandboxes(parts, leases[WorkKind.SANDBOX], process, stack)
        graders = await _sandboxes(parts, leases[WorkKind.SANDBOX], f"{process}-grader", stack)
        if (told := planned(config, parts.tasks)) is not None:
            events.emit(told)
        for line in verdict(parts.template, parts.codec).lines():
            events.emit(Noted(level="info", text=line.strip()))
        await engine.start()
        stack.push_async_callback(engine.close)
        audit = AuditLog(parts.folder.audit(process), clock, parts.blobs("audit"))
        stack.callback(audit.close)
        factory = RolloutFactory(
            tasks=parts.tasks,
            agent=buildable(config.agent, "agent").build(),
            engine=engine,
            door=ToolDoor(
                ToolRegistry.installed(), GuardChain([AllowList()]), audit, clock=clock, events=events
            ),
            sandboxes=sandboxes,
            reward=buildable(config.reward, "reward").build(graders, clock),
            ledger=parts.store,
            archive=parts.archive,
            codec=parts.codec,
            template=parts.template,
            clock=clock,
            events=events,
            config=config.rollout.model_copy(
                update={"concurrency": _at_once(parts, config.rollout.concurrency, events)}
            ),
            identity=Identity(run=parts.folder.id),
            rng=random.Random(config.seed),
        )
        side = RolloutSide(parts, channel, events, leases[WorkKind.SAMPLING], engine, factory)
        reporting = asyncio.create_task(side.report())
        try:
            yield side
        finally:
            reporting.cancel()


def _at_once(parts: Parts, wanted: int, events: EventLog | None = None) -> int:
    """How many of the `wanted` rollouts at once the plan of keys and values admits; `events` is told where
    it is fewer."""
    room = admitted(parts.config, parts.tasks.task("train", 0).limits.max_tokens)
    if room is None or room >= wanted:
        return wanted
    if events is not None:
        text = (
            f"{room} rollouts at once instead of rollout.concurrency = {wanted}: keys and values of more "
            "have no place in engine.kv_tokens and the rows of engine.max_batch"
        )
        events.emit(Noted(level="warning", text=text))
    return room


async def _sandboxes(parts: Parts, lease: Lease, name: str, stack: AsyncExitStack) -> SandboxProvider:
    """A started provider of its own: graders and agents share none, so neither waits for or reaches the
    other.

    Raises:
        ConfigError: fewer sandboxes than rollouts at once.
    """
    config = parts.config
    provider: SandboxProvider = buildable(config.sandbox, "sandbox").build(
        parts.folder.sandboxes / name, lease=lease, clock=parts.clock
    )
    wanted = max(config.rollout.concurrency, config.evaluation.concurrency)
    if provider.capacity < wanted:
        raise ConfigError(
            f"{wanted} rollouts at once (rollout.concurrency, evaluation.concurrency) need as many "
            f"sandboxes, only {provider.capacity} may live: raise sandbox.max_live"
        )
    await provider.start()
    stack.push_async_callback(provider.close)
    return provider


async def work(folder: RunFolder, events: EventLog, stop: Stop) -> None:
    """The rollout process of an async run."""
    parts = build(folder, SystemClock())
    channel = parts.file_channel()
    kinds = (WorkKind.SAMPLING, WorkKind.SANDBOX)
    async with (
        leased(parts.clock, events, stop, *kinds) as leases,
        opened(parts, channel, parts.decoder(), events, leases, "rollouts") as side,
        scraped(side.engine, parts.config.loop.metrics_port, parts.clock),
    ):
        await side.first_weights()
        if side.lease.revoked:
            return
        await side.measure("before")
        producing = asyncio.create_task(side.produce())
        following = asyncio.create_task(side.follow(parts.config.loop.steps))
        await asyncio.wait({producing, following}, return_when=asyncio.FIRST_COMPLETED)
        for task in (producing, following):
            task.cancel()
        for result in await asyncio.gather(producing, following, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        if not side.lease.revoked:
            await side.measure("after")
    parts.close()


def _next_number(store: Store) -> int:
    """The task number to go on with. Evaluations are passed over, however many came last."""
    limit = LOOK_BACK
    while True:
        newest = store.newest(limit)
        trained = sum(identity.job == "train" for identity in newest)
        if trained >= LOOK_BACK // 2 or len(newest) < limit:
            return next_number(newest)
        limit *= 4
