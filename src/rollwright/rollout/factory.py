"""From tasks to scored groups: many rollouts at once, none of which can stop the others.

Role: the rollout factory. Neighbours: task set above, agents below; the conductor puts the groups it gives
into the queue. Invariants: every started rollout is in the ledger before its first token and ends there
with one disposition, or in a group that was given out; a bad, slow or hanging rollout costs its own place
only; every retry has a bound.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import nullcontext

from msgspec.structs import replace

from rollwright.agents.base import Agent, Codec, Template
from rollwright.archive.base import Archive
from rollwright.buffer.base import Drop, Ledger
from rollwright.clock import Clock, let_go
from rollwright.engine.base import Engine
from rollwright.events import GroupEnded, Sink
from rollwright.reward.base import Reward
from rollwright.rollout.attempt import Attempts
from rollwright.rollout.base import FactoryStats, GroupReport
from rollwright.rollout.config import RolloutConfig
from rollwright.rollout.deadlines import Window
from rollwright.rollout.groups import Book, mean, no_signal
from rollwright.rollout.rounds import Rounds
from rollwright.rollout.tally import Tally
from rollwright.sandbox.base import SandboxProvider
from rollwright.tasks.base import Split, TaskSet
from rollwright.tools.base import Door
from rollwright.types import Disposition, Group, Identity, Sampling, Scored, Task


class RolloutFactory:
    """Makes groups for training and scored rollouts for evaluation; one event loop owns it."""

    def __init__(
        self,
        *,
        tasks: TaskSet,
        agent: Agent,
        engine: Engine,
        door: Door,
        sandboxes: SandboxProvider,
        reward: Reward,
        ledger: Ledger,
        archive: Archive,
        codec: Codec,
        template: Template,
        clock: Clock,
        events: Sink,
        config: RolloutConfig,
        identity: Identity,
        rng: random.Random,
    ) -> None:
        seed = rng.getrandbits(31)  # the only draw: rollouts run in any order, so each has noise of its own
        self._tasks = tasks
        self._ledger = ledger
        self._archive = archive
        self._clock = clock
        self._events = events
        self._config = config
        self._identity = identity
        self._sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=seed)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._tally = Tally(config.success)
        self._attempts = Attempts(
            agent=agent,
            engine=engine,
            door=door,
            sandboxes=sandboxes,
            reward=reward,
            codec=codec,
            template=template,
            clock=clock,
            events=events,
            config=config,
            archive=archive,
            seed=seed,
            present=engine.present if isinstance(engine, Rounds) else nullcontext,
        )

    def stats(self) -> FactoryStats:
        """Counters of training rollouts since the start; evaluations are not in them."""
        return self._tally.stats()

    async def group(self, task: Task, group_id: str) -> GroupReport:
        """One group of `task`. A kept group's members stay running in the ledger until the caller puts it
        into the queue; members of a dropped one have ended.

        Raises:
            StoreError: the ledger refused.
        """
        book = Book(self._ledger, self._tally)
        window = Window(self._clock, self._config.group_seconds)
        seats = [
            asyncio.ensure_future(self._seat(task, group_id, index, book, window))
            for index in range(self._config.group_size)
        ]
        try:
            members = await self._members(seats, window)
            return self._settle(task, group_id, members, book)
        finally:
            try:
                await let_go(self._clock, *seats)
            finally:
                book.close("group_timeout" if window.over else "cancelled")

    async def _members(self, seats: Sequence[asyncio.Future[Scored]], window: Window) -> list[Scored]:
        """What the seats gave until all are done or the window is over."""
        timer = asyncio.ensure_future(window.wait_over())
        try:
            running: set[asyncio.Future[Scored]] = set(seats)
            while running and not timer.done():
                waiting: set[asyncio.Future[Scored] | asyncio.Future[None]] = {*running, timer}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for seat in [seat for seat in running if seat.done()]:
                    seat.result()  # a refusal of the ledger ends the group at once
                    running.discard(seat)
            await let_go(self._clock, *running)
        finally:
            timer.cancel()
        return [
            seat.result()
            for seat in seats
            if seat.done() and not seat.cancelled() and seat.exception() is None
        ]

    async def _seat(self, task: Task, group_id: str, index: int, book: Book, window: Window) -> Scored:
        """One member: attempts until one has a score, the bound is reached or the window is over."""
        for attempt in range(self._config.max_attempts):
            async with self._slots:
                window.open()
                identity = self._named(task, group_id, f"{group_id}/{index}.{attempt}", attempt)
                scored = await self._attempts.run(task, identity, self._sampling, book, window)
            if scored.score.value is not None or window.over:
                break
        return scored

    def _named(self, task: Task, group: str, rollout: str, attempt: int) -> Identity:
        return replace(self._identity, task=task.id, group=group, rollout=rollout, attempt=attempt)

    def _settle(self, task: Task, group_id: str, members: Sequence[Scored], book: Book) -> GroupReport:
        """Keep the group or drop it, with everything that follows."""
        kept = [member for member in members if member.score.value is not None]
        ids = [member.rollout.identity.rollout for member in kept]
        disposition, reason = Disposition.NO_SIGNAL, no_signal(kept, self._config.success)
        if len(kept) < self._config.min_members:
            disposition, reason = Disposition.VOID, "incomplete"
        if reason:
            book.end(ids, disposition, reason)
        else:
            book.hand_over(ids)
        self._tally.group(reason)
        self._archive.flush()  # before anybody can queue the group
        self._events.emit(
            GroupEnded(group=group_id, task=task.id, kept=not reason, reason=reason, mean=mean(kept))
        )
        group = None if reason else Group(id=group_id, task=task.id, members=tuple(kept))
        return GroupReport(group=group, task=task.id, reason=reason, voided=book.voided)

    async def groups(
        self, numbers: Iterator[int], *, prefix: str = "g", split: Split = "train"
    ) -> AsyncGenerator[GroupReport, None]:
        """Groups of the tasks `numbers` as they are done, with `config.width` in flight; ends when
        `numbers` does.

        A group without signal is replaced by one of the next number, `max_regroups` times at most; there is
        one report for each place. Group ids are `prefix` + number and must be new in the ledger. Use it in
        `contextlib.aclosing`: closing cancels what is in flight and ends what nobody took as surplus.

        Raises:
            StoreError: the ledger refused.
        """
        running: dict[asyncio.Future[GroupReport], None] = {}
        ready: list[GroupReport] = []
        try:
            while True:
                while len(running) + len(ready) < self._config.width:
                    number = next(numbers, None)
                    if number is None:
                        break
                    running[asyncio.ensure_future(self._place(number, numbers, prefix, split))] = None
                if not running and not ready:
                    return
                if not ready:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for place in [place for place in running if place.done()]:
                    del running[place]
                    ready.append(place.result())
                while ready:
                    yield ready.pop(0)
        finally:
            await self._abandon(running, ready)

    async def _place(self, number: int, numbers: Iterator[int], prefix: str, split: Split) -> GroupReport:
        """The group of `number`, or of a fresh task where that one had no signal."""
        voided = 0
        for tried in range(1, self._config.max_regroups + 2):
            report = await self.group(self._tasks.task(split, number), f"{prefix}{number}")
            voided += report.voided
            report = replace(report, attempts=tried, voided=voided)
            if report.reason not in ("all right", "all wrong") or tried > self._config.max_regroups:
                break
            fresh = next(numbers, None)
            if fresh is None:
                break
            number = fresh
        return report

    async def _abandon(
        self, running: dict[asyncio.Future[GroupReport], None], ready: Sequence[GroupReport]
    ) -> None:
        """Nobody takes more groups: end what is in flight, and what is done and was not taken."""
        left = list(ready)
        try:
            await let_go(self._clock, *running)
        finally:
            for place in running:
                if place.done() and not place.cancelled() and place.exception() is None:
                    left.append(place.result())
            members = [member for report in left if report.group for member in report.group.members]
            self._ledger.drop(
                [
                    Drop(
                        rollout=member.rollout.identity.rollout,
                        disposition=Disposition.SURPLUS,
                        reason="not taken",
                    )
                    for member in members
                ]
            )

    async def evaluate(
        self,
        tasks: Sequence[Task],
        sampling: Sampling,
        *,
        label: str,
        concurrency: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Scored]:
        """Each task once, in their order; unscorable attempts are tried again, up to `max_attempts`. What
        stays without a value is in the list too, so that nobody counts it as a trial.

        `label` is part of the rollout ids and must be new in the ledger. `concurrency` replaces the
        configured one. `progress` is told how many tasks are done, 0 first.

        Raises:
            StoreError: the ledger refused.
        """
        book = Book(self._ledger, Tally(self._config.success))
        slots = self._slots if concurrency is None else asyncio.Semaphore(concurrency)
        trials = [
            asyncio.ensure_future(self._trial(task, sampling, f"{label}/{number}", book, slots))
            for number, task in enumerate(tasks)
        ]
        progress(0)
        ended = itertools.count(1)
        for trial in trials:
            trial.add_done_callback(lambda _: progress(next(ended)))
        try:
            return list(await asyncio.gather(*trials))
        finally:
            try:
                await let_go(self._clock, *trials)
            finally:
                book.close("cancelled")
                self._archive.flush()

    async def _trial(
        self, task: Task, sampling: Sampling, name: str, book: Book, slots: asyncio.Semaphore
    ) -> Scored:
        """One evaluated task."""
        for attempt in range(self._config.max_attempts):
            async with slots:
                identity = replace(self._named(task, name, f"{name}.{attempt}", attempt), job="eval")
                scored = await self._attempts.run(task, identity, sampling, book)
            if scored.score.value is not None:
                book.end([identity.rollout], Disposition.EVALUATED, "")
                break
        return scored
