"""One attempt at one task: ledger, sandbox, agent, reward, and whatever goes wrong on the way.

Role: turns every failure into a typed outcome. Neighbours: `factory` decides what follows from it.
Invariants: in the ledger before the first token; what ended without a score is in the ledger as void or
unscorable before this returns or raises; the sandbox is killed on every path; nothing but `StoreError` and
cancellation gets out.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from msgspec.structs import replace

from rollwright.agents.base import Agent, Codec, Draft, Session, Template
from rollwright.archive.base import Archive
from rollwright.clock import Clock, within
from rollwright.engine.base import Engine
from rollwright.errors import DeadlineExceeded, LeaseRevoked, RollwrightError, SandboxLost, boundary
from rollwright.events import Noted, RolloutEnded, Sink, SpanEnded, TraceContext
from rollwright.reward.base import Reward
from rollwright.rollout.config import RolloutConfig
from rollwright.rollout.deadlines import Window, outcome_of
from rollwright.rollout.groups import Book
from rollwright.rollout.tally import sampled_tokens
from rollwright.sandbox.base import Sandbox, SandboxProvider
from rollwright.tools.base import Door, SandboxHandle
from rollwright.types import Disposition, Identity, Outcome, Rollout, Sampling, Score, Scored, Task


@dataclass
class Attempts:
    """Runs attempts; holds the parts that all of them use."""

    agent: Agent
    engine: Engine
    door: Door
    sandboxes: SandboxProvider
    reward: Reward
    codec: Codec
    template: Template
    clock: Clock
    events: Sink
    config: RolloutConfig
    archive: Archive
    seed: int
    present: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a rollout is under way."""
    _told: set[str] = field(default_factory=set)
    """Kinds of error that were noted already."""
    _killing: set[asyncio.Future[None]] = field(default_factory=set)
    """Sandboxes on their way out."""

    async def run(
        self, task: Task, identity: Identity, sampling: Sampling, book: Book, window: Window | None = None
    ) -> Scored:
        """One rollout with its score. A score with a value leaves the rollout open in `book`, for its group
        to settle.

        Raises:
            StoreError: the ledger refused.
        """
        trace = TraceContext.new(random.Random(f"{self.seed}/{identity.rollout}"))
        identity = replace(identity, trace=trace.trace)
        book.start(identity)
        began, wall, draft = self.clock.now(), self.clock.wall(), Draft()
        try:
            with self.present():
                scored = await self._work(task, identity, sampling, trace, window, draft)
        except (Exception, asyncio.CancelledError) as error:  # boundary: one bad rollout voids itself only
            outcome = outcome_of(error, window)
            text = f"{type(error).__name__}: {error}"
            seconds = self.clock.now() - began
            rollout = Rollout(
                identity=identity,
                rows=draft.rows(),
                turns=draft.turns(),
                outcome=outcome,
                error=text,
                started=wall,
                seconds=seconds,
            )
            scored = Scored(rollout=rollout, score=Score.unscorable(outcome.value))
            self._end(task, scored, trace, book)
            if isinstance(error, asyncio.CancelledError):
                raise
            self._note(error, identity)
        else:
            self._end(task, scored, trace, book)
        return scored

    async def _work(
        self,
        task: Task,
        identity: Identity,
        sampling: Sampling,
        trace: TraceContext,
        window: Window | None,
        draft: Draft,
    ) -> Scored:
        """The rollout and its score; failures of any part go out attributed to it."""
        async with self._sandbox(task, identity) as sandbox:
            now = self.clock.now()
            ends = now + task.limits.rollout_seconds
            if window is not None:
                ends = min(ends, window.open())
            session = Session(
                identity=identity,
                engine=self.engine,
                door=self.door,
                codec=self.codec,
                template=self.template,
                sandbox=SandboxHandle(sandbox),
                sampling=sampling,
                clock=self.clock,
                trace=trace,
                events=self.events,
                deadline=ends,
                draft=draft,
            )
            patience = ends - now + self.config.grace_seconds
            with boundary("agent", identity.rollout):
                work = self.agent.run(task, session)
                rollout = await within(self.clock, work, patience, f"rollout {identity.rollout}")
                if rollout.identity != identity:
                    raise RollwrightError(f"the agent gave a rollout of {rollout.identity}, not {identity}")
            if rollout.outcome is Outcome.ROLLOUT_TIMEOUT and window is not None and window.over:
                rollout = replace(rollout, outcome=Outcome.GROUP_TIMEOUT)
            return Scored(rollout=rollout, score=await self._score(task, rollout, sandbox))

    async def _score(self, task: Task, rollout: Rollout, sandbox: Sandbox) -> Score:
        """The reward's score. A reward that fails or hangs says nothing about the policy."""
        if not rollout.outcome.scorable:
            return Score.unscorable(rollout.outcome.value)
        name = rollout.identity.rollout
        try:
            with boundary("reward", name):
                work = self.reward.score(task, rollout, sandbox)
                score = await within(self.clock, work, self.config.reward_seconds, f"scoring {name}")
        except Exception as error:  # boundary: a reward is a plug-in; its failure is no wrong answer
            self._note(error, rollout.identity)
            return Score.unscorable(f"reward failed: {type(error).__name__}: {error}")
        if score.value is not None and not math.isfinite(score.value):
            return Score.unscorable(f"the reward gave {score.value}")
        return score

    @asynccontextmanager
    async def _sandbox(self, task: Task, identity: Identity) -> AsyncIterator[Sandbox]:
        """The agent's sandbox, killed on every path."""
        name, seconds = identity.rollout, self.config.sandbox_seconds
        making = asyncio.ensure_future(self.sandboxes.create(task.environment, owner=name))
        try:
            with boundary("sandbox", name):
                sandbox = await within(self.clock, making, seconds, f"making the sandbox of {name}")
        except DeadlineExceeded as error:
            making.add_done_callback(lambda made: self._came_late(made, identity))
            raise SandboxLost(str(error)) from error
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._came_late(made, identity))
            raise
        try:
            yield sandbox
        finally:
            await self._killed(sandbox, identity)

    def _came_late(self, made: asyncio.Future[Sandbox], identity: Identity) -> None:
        """A sandbox that nobody waits for any more is killed when it comes."""
        if not made.cancelled() and made.exception() is None:
            self._killed(made.result(), identity)

    def _killed(self, sandbox: Sandbox, identity: Identity) -> asyncio.Future[None]:
        """Kill `sandbox`; cancelling whoever waits does not stop it."""
        killing = asyncio.ensure_future(self._kill(sandbox, identity))
        self._killing.add(killing)
        killing.add_done_callback(self._killing.discard)
        return asyncio.shield(killing)

    async def _kill(self, sandbox: Sandbox, identity: Identity) -> None:
        what = f"ending the sandbox of {identity.rollout}"
        try:
            with boundary("sandbox", identity.rollout):
                await within(self.clock, sandbox.kill(), self.config.sandbox_seconds, what)
        except Exception as error:  # boundary: the rollout is over; the reaper finds what is left
            self._note(error, identity)

    def _end(self, task: Task, scored: Scored, trace: TraceContext, book: Book) -> None:
        """Ledger first, then what is kept for people and the events that tell of it."""
        rollout, score = scored.rollout, scored.score
        if score.value is None:
            kind = Disposition.UNSCORABLE if rollout.outcome.scorable else Disposition.VOID
            book.void(rollout.identity.rollout, kind, score.reason)
        book.tally.rollout(scored)
        self.archive.add(task, scored)
        self.events.emit(
            SpanEnded(
                trace=trace.trace,
                name="rollout",
                span=trace.span,
                parent="",
                seconds=rollout.seconds,
                attributes={"rollout": rollout.identity.rollout, "outcome": rollout.outcome.value},
            )
        )
        parts: dict[str, float] = {}
        for part in score.parts:  # of several checks of one kind, the worst
            parts[part.name] = min(part.value, parts.get(part.name, part.value))
        self.events.emit(
            RolloutEnded(
                trace=trace.trace,
                rollout=rollout.identity.rollout,
                group=rollout.identity.group,
                task=rollout.identity.task,
                outcome=rollout.outcome.value,
                value=score.value,
                turns=len(rollout.turns),
                sampled=sampled_tokens(scored),
                seconds=rollout.seconds,
                error=rollout.error or (score.reason if score.value is None else None),
                parts=parts,
                job=rollout.identity.job,
            )
        )

    def _note(self, error: BaseException, identity: Identity) -> None:
        """Tell the first error of each kind, with its rollout; the others are in their rollouts' events. A
        revoked lease is no error: the run was asked to stop."""
        if isinstance(error, LeaseRevoked):
            return
        kind = f"{getattr(error, 'component', None)}/{type(error).__name__}"
        if kind not in self._told:
            self._told.add(kind)
            where = getattr(error, "component", None) or "factory"
            text = f"rollout {identity.rollout}: {where} failed: {type(error).__name__}: {error}"
            self.events.emit(Noted(trace=identity.trace, level="error", text=text))
