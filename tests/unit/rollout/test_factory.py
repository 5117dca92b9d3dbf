"""The factory: a bad, slow or hanging rollout costs its own place only, and the ledger always balances."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import pytest

from rollwright.agents.base import Session
from rollwright.buffer.memory import MemoryStore
from rollwright.errors import EngineClosed, LeaseRevoked, SandboxLost, StoreError
from rollwright.events import GroupEnded, ListSink, Noted, RolloutEnded
from rollwright.rollout.base import GroupReport
from rollwright.rollout.config import RolloutConfig
from rollwright.rollout.factory import RolloutFactory
from rollwright.sandbox.base import Sandbox
from rollwright.tasks.base import Demonstration, Split
from rollwright.testing.agents import Act, ScriptedAgent
from rollwright.testing.archives import NoArchive
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.types import (
    AnswerEquals,
    Disposition,
    Identity,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Score,
    Task,
    TaskLimits,
)

LIMITS = TaskLimits(rollout_seconds=20.0)


def task(number: int) -> Task:
    return Task(
        id=f"t{number}",
        set="test",
        messages=(Message(role="user", content=str(number)),),
        tools=(),
        checks=(AnswerEquals(expected="yes"),),
        limits=LIMITS,
    )


class Tasks:
    name = "test"

    def task(self, split: Split, number: int) -> Task:
        return task(number)

    def demonstrate(self, task: Task, number: int) -> Demonstration | None:
        return None

    def pieces(self) -> tuple[str, ...]:
        return ()


class Values:
    """A reward that reads the answer as the value; `fault` may raise, or hang."""

    def __init__(self, fault: Callable[[Rollout], object] | None = None) -> None:
        self.fault = fault

    async def score(self, task: Task, rollout: Rollout, sandbox: Sandbox | None) -> Score:
        if self.fault is not None:
            waiting = self.fault(rollout)
            if asyncio.isfuture(waiting) or asyncio.iscoroutine(waiting):
                await waiting
        return Score(value=float(rollout.answer or 0))


@dataclass
class World:
    """A factory with fakes around it."""

    act: Act
    reward: Values = field(default_factory=Values)
    config: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=4, min_members=2))
    sandboxes: MemorySandboxes = field(default_factory=MemorySandboxes)
    store: MemoryStore = field(default_factory=lambda: MemoryStore(1000))
    clock: FakeClock = field(default_factory=lambda: FakeClock(patience=200))
    events: ListSink = field(default_factory=ListSink)

    def __post_init__(self) -> None:
        self.factory = RolloutFactory(
            tasks=Tasks(),
            agent=ScriptedAgent(self.act),
            engine=None,  # type: ignore[arg-type]
            door=None,  # type: ignore[arg-type]
            sandboxes=self.sandboxes,
            reward=self.reward,
            archive=NoArchive(),
            ledger=self.store,
            codec=None,  # type: ignore[arg-type]
            template=None,  # type: ignore[arg-type]
            clock=self.clock,
            events=self.events,
            config=self.config,
            identity=Identity(run="run"),
            rng=random.Random(0),
        )

    def by(self) -> dict[str, int]:
        """Dispositions that occur, after checking that nothing is lost or ended twice."""
        counts = self.store.counts()
        assert counts.balanced
        assert self.store.late() == (), "a rollout was ended twice"
        assert not self.sandboxes.live, "a sandbox was left open"
        ended = self.of(RolloutEnded)
        assert counts.started == len(ended) == len({event.rollout for event in ended})
        return {name: count for name, count in counts.by.items() if count}

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [event for event in self.events.events if isinstance(event, kind)]


def place(session: Session) -> tuple[int, int]:
    """(member, attempt) of a rollout."""
    member, attempt = session.identity.rollout.rpartition("/")[2].split(".")
    return int(member), int(attempt)


async def alternate(task: Task, session: Session) -> str:
    """Half of the members right."""
    return str(place(session)[0] % 2)


async def hang(*_: object) -> str:
    await asyncio.Event().wait()
    return ""


async def rounds(number: int) -> None:
    """Let everything that can run do so; the clock stands still for fewer than its patience."""
    for _ in range(number):
        await asyncio.sleep(0)


# A group.


async def test_a_group_is_kept_and_its_members_wait_for_the_queue() -> None:
    world = World(alternate)
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None
    assert [member.score.value for member in report.group.members] == [0.0, 1.0, 0.0, 1.0]
    assert [m.rollout.identity.rollout for m in report.group.members] == [f"g0/{i}.0" for i in range(4)]
    assert len({m.rollout.identity.trace for m in report.group.members}) == 4
    assert world.by() == {"running": 4}
    assert world.store.put(report.group)
    assert world.by() == {"queued": 4}
    stats = world.factory.stats()
    assert (stats.rollouts, stats.scored, stats.successes, stats.groups_kept) == (4, 4, 2, 1)
    assert stats.reward_sum == 2.0
    assert stats.sampled_tokens == 16


async def test_a_rollout_is_in_the_ledger_before_anything_of_it_happens() -> None:
    seen = []

    def make(owner: str) -> None:
        entry = world.store.find(owner)
        seen.append(entry is not None and entry.disposition is Disposition.RUNNING)

    world = World(alternate, sandboxes=MemorySandboxes(make))
    await world.factory.group(task(0), "g0")
    assert seen == [True] * 4


@pytest.mark.parametrize(("answer", "reason"), [("1", "all right"), ("0", "all wrong"), ("0.5", "all wrong")])
async def test_a_group_without_signal_is_dropped_and_counted(answer: str, reason: str) -> None:
    async def same(task: Task, session: Session) -> str:
        return answer

    world = World(same)
    report = await world.factory.group(task(0), "g0")
    assert (report.group, report.reason) == (None, reason)
    assert world.by() == {"no_signal": 4}
    assert world.of(GroupEnded) == [
        GroupEnded(group="g0", task="t0", kept=False, reason=reason, mean=float(answer))
    ]
    stats = world.factory.stats()
    assert (stats.groups_all_right, stats.groups_all_wrong) == (
        int(reason == "all right"),
        int(reason == "all wrong"),
    )


FAULTS = {
    Outcome.SANDBOX_LOST: SandboxLost("gone"),
    Outcome.ENGINE_ERROR: EngineClosed("closed"),
    Outcome.REVOKED: LeaseRevoked("taken"),
    Outcome.ERROR: KeyError("bug"),
}


@pytest.mark.parametrize("outcome", FAULTS)
async def test_a_failure_voids_only_its_rollout_which_is_sampled_again(outcome: Outcome) -> None:
    async def act(task: Task, session: Session) -> str:
        if place(session) in ((1, 0), (1, 1), (3, 0)):
            raise FAULTS[outcome]
        return await alternate(task, session)

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None
    assert [m.rollout.identity.rollout for m in report.group.members] == [
        "g0/0.0",
        "g0/1.2",
        "g0/2.0",
        "g0/3.1",
    ]
    assert [m.rollout.identity.attempt for m in report.group.members] == [0, 2, 0, 1]
    assert report.voided == 3
    assert world.by() == {"running": 4, "void": 3}
    entry = world.store.find("g0/1.1")
    assert entry is not None and entry.reason == outcome.value
    notes = world.of(Noted)  # the first error of its kind, with its rollout; being asked to stop is none
    assert len(notes) == (outcome is not Outcome.REVOKED)
    assert all("g0/1.0" in note.text and type(FAULTS[outcome]).__name__ in note.text for note in notes)
    (ended,) = [event for event in world.of(RolloutEnded) if event.rollout == "g0/3.0"]
    assert ended.outcome == outcome.value
    assert type(FAULTS[outcome]).__name__ in ended.error


async def test_a_member_that_always_fails_leaves_the_group_without_it() -> None:
    async def act(task: Task, session: Session) -> str:
        if place(session)[0] == 3:
            raise SandboxLost("gone")
        return await alternate(task, session)

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 3
    assert world.by() == {"running": 3, "void": 3}


async def test_a_group_with_too_few_members_is_dropped() -> None:
    async def act(task: Task, session: Session) -> str:
        if place(session)[0] > 0:
            raise SandboxLost("gone")
        return "1"

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert (report.group, report.reason, report.voided) == (None, "incomplete", 9)
    assert world.by() == {"void": 10}
    assert world.factory.stats().groups_incomplete == 1


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.scorable])
async def test_an_outcome_that_says_nothing_about_the_policy_is_void(outcome: Outcome) -> None:
    async def act(task: Task, session: Session) -> str | Outcome:
        return outcome if place(session) == (0, 0) else await alternate(task, session)

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert report.voided == 1
    entry = world.store.find("g0/0.0")
    assert entry is not None and (entry.disposition, entry.reason) == (Disposition.VOID, outcome.value)
    assert world.by() == {"running": 4, "void": 1}


async def test_a_truncated_rollout_is_kept() -> None:
    async def act(task: Task, session: Session) -> str | Outcome:
        return Outcome.CONTEXT_FULL if place(session)[0] == 0 else "1"

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None
    assert [m.score.value for m in report.group.members] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("fault", ["raises", "hangs", "nan"])
async def test_a_reward_that_fails_makes_a_rollout_unscorable(fault: str) -> None:
    def break_first(rollout: Rollout) -> object:
        if rollout.identity.rollout == "g0/1.0":
            if fault == "raises":
                raise ZeroDivisionError("judge")
            if fault == "hangs":
                return hang()
        return None

    async def act(task: Task, session: Session) -> str:
        if fault == "nan" and place(session) == (1, 0):
            return "nan"
        return await alternate(task, session)

    world = World(act, reward=Values(break_first))
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 4
    assert world.by() == {"running": 4, "unscorable": 1}
    entry = world.store.find("g0/1.0")
    assert entry is not None
    assert {"raises": "judge", "hangs": "did not finish", "nan": "nan"}[fault] in entry.reason
    assert world.factory.stats().unscorable == 1


@pytest.mark.parametrize("fault", ["raises", "hangs", "late"])
async def test_a_sandbox_that_cannot_be_made_voids_its_rollout(fault: str) -> None:
    class Faulty(MemorySandboxes):
        async def create(self, environment=None, *, owner, **more):  # type: ignore[no-untyped-def]
            if owner == "g0/1.0":
                if fault == "raises":
                    raise OSError("no room")
                if fault == "hangs":
                    await asyncio.Event().wait()
                with suppress(asyncio.CancelledError):  # comes although nobody waits any more
                    await asyncio.Event().wait()
            return await super().create(environment, owner=owner, **more)

    world = World(alternate, sandboxes=Faulty())
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 4
    await asyncio.sleep(0)
    assert world.by() == {"running": 4, "void": 1}


@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_a_sandbox_that_cannot_be_killed_does_not_spoil_its_rollout(fault: str) -> None:
    class Sticky(MemorySandboxes):
        async def create(self, environment=None, *, owner, **more):  # type: ignore[no-untyped-def]
            made = await super().create(environment, owner=owner, **more)
            if owner == "g0/1.0":
                really = made.kill

                async def kill() -> None:
                    await really()
                    if fault == "raises":
                        raise OSError("busy")
                    await asyncio.Event().wait()

                made.kill = kill  # type: ignore[method-assign]
            return made

    world = World(alternate, sandboxes=Sticky())
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 4
    assert world.by() == {"running": 4}
    assert "ending the sandbox of g0/1.0" in world.of(Noted)[0].text or "busy" in world.of(Noted)[0].text


# Deadlines.


async def test_an_agent_that_ignores_its_deadline_is_voided_and_sampled_again() -> None:
    async def act(task: Task, session: Session) -> str:
        return await (hang() if place(session) == (1, 0) else alternate(task, session))

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 4
    entry = world.store.find("g0/1.0")
    assert entry is not None and entry.reason == "rollout_timeout"
    assert world.clock.now() == 25.0  # rollout_seconds + grace_seconds


async def test_what_is_unfinished_when_the_group_ends_is_voided() -> None:
    async def act(task: Task, session: Session) -> str:
        return await (hang() if place(session)[0] == 1 else alternate(task, session))

    world = World(act, config=RolloutConfig(group_size=4, min_members=2, group_seconds=10.0))
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None
    assert [m.rollout.identity.rollout for m in report.group.members] == ["g0/0.0", "g0/2.0", "g0/3.0"]
    entry = world.store.find("g0/1.0")
    assert entry is not None and entry.reason == "group_timeout"
    assert world.by() == {"running": 3, "void": 1}
    assert world.clock.now() == 10.0
    assert world.factory.stats().voided == 1


async def test_the_groups_time_runs_while_sandboxes_are_made() -> None:
    class Hanging(MemorySandboxes):
        async def create(self, environment=None, *, owner, **more):  # type: ignore[no-untyped-def]
            await asyncio.Event().wait()

    config = RolloutConfig(group_size=4, min_members=2, group_seconds=10.0)
    world = World(alternate, sandboxes=Hanging(), config=config)
    report = await world.factory.group(task(0), "g0")
    assert (report.group, report.reason) == (None, "incomplete")
    assert world.clock.now() == 10.0
    assert world.by() == {"void": 4}


async def test_a_cancellation_does_not_stop_a_sandbox_from_being_killed() -> None:
    closing = asyncio.Event()

    class Slow(MemorySandboxes):
        async def create(self, environment=None, *, owner, **more):  # type: ignore[no-untyped-def]
            made = await super().create(environment, owner=owner, **more)
            really = made.kill

            async def kill() -> None:
                closing.set()
                await world.clock.sleep(1.0)
                await really()

            made.kill = kill  # type: ignore[method-assign]
            return made

    world = World(alternate, sandboxes=Slow())
    running = asyncio.ensure_future(world.factory.group(task(0), "g0"))
    await closing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await world.clock.sleep(2.0)
    assert world.by() == {"void": 4}


async def test_a_rollout_that_swallows_its_cancellation_holds_nobody_up() -> None:
    release = asyncio.Event()

    async def act(task: Task, session: Session) -> str:
        while place(session)[0] == 1 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return await alternate(task, session)

    world = World(act, config=RolloutConfig(group_size=4, min_members=2, group_seconds=10.0))
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 3
    release.set()
    await rounds(100)
    assert world.by() == {"running": 3, "void": 1}  # what came late changed nothing


async def test_waiting_for_a_slot_does_not_use_up_the_groups_time() -> None:
    async def act(task: Task, session: Session) -> str:
        await session.clock.sleep(8.0)
        return await alternate(task, session)

    config = RolloutConfig(group_size=2, min_members=2, concurrency=2, group_seconds=10.0)
    world = World(act, config=config)
    reports = await asyncio.gather(*(world.factory.group(task(i), f"g{i}") for i in range(5)))
    assert all(report.group is not None for report in reports)
    assert world.clock.now() == 40.0


async def test_a_cancellation_from_inside_is_a_failure_like_any_other() -> None:
    async def act(task: Task, session: Session) -> str:
        if place(session) == (1, 0):
            raise asyncio.CancelledError
        return await alternate(task, session)

    world = World(act)
    report = await world.factory.group(task(0), "g0")
    assert report.group is not None and len(report.group.members) == 4
    assert world.by() == {"running": 4, "void": 1}


async def test_a_cancelled_group_ends_everywhere() -> None:
    async def act(task: Task, session: Session) -> str:
        return await (alternate(task, session) if place(session)[0] < 2 else hang())

    world = World(act)
    running = asyncio.ensure_future(world.factory.group(task(0), "g0"))
    await rounds(100)
    assert len(world.of(RolloutEnded)) == 2
    assert world.store.counts().by["running"] == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.by() == {"void": 4}


async def test_a_ledger_that_refuses_is_no_rollouts_fault() -> None:
    world = World(alternate)
    world.store.start([Identity(run="run", rollout="g0/1.0")])
    with pytest.raises(StoreError):
        await world.factory.group(task(0), "g0")
    counts = world.store.counts()
    assert counts.balanced
    assert counts.by["running"] == 1  # the one that was there before


# Many groups.


async def collect(world: World, numbers: list[int], **options: str) -> list[GroupReport]:
    async with aclosing(world.factory.groups(iter(numbers), **options)) as reports:  # type: ignore[arg-type]
        return [report async for report in reports]


async def test_a_slow_rollout_delays_only_its_own_group() -> None:
    finished: list[str] = []

    async def act(task: Task, session: Session) -> str:
        if session.identity.rollout == "g0/1.0":
            await session.clock.sleep(15.0)
        finished.append(session.identity.group)
        return await alternate(task, session)

    config = RolloutConfig(group_size=4, min_members=4, concurrency=8, groups_ahead=0)
    world = World(act, config=config)
    reports = await collect(world, list(range(10)))
    assert [report.task for report in reports] == [*(f"t{i}" for i in range(1, 10)), "t0"]
    assert all(report.group is not None for report in reports)
    assert world.clock.now() == 15.0


async def test_no_more_rollouts_at_once_than_configured() -> None:
    now = most = 0

    async def act(task: Task, session: Session) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await session.clock.sleep(1.0)
        now -= 1
        return await alternate(task, session)

    world = World(act, config=RolloutConfig(group_size=4, min_members=2, concurrency=6))
    await collect(world, list(range(8)))
    assert most == 6


async def test_a_group_without_signal_is_replaced_by_a_fresh_task_within_the_bound() -> None:
    async def act(task: Task, session: Session) -> str:
        return "1" if task.id in ("t0", "t4", "t5", "t6") else await alternate(task, session)

    config = RolloutConfig(group_size=4, min_members=2, concurrency=1, groups_ahead=0, max_regroups=2)
    world = World(act, config=config)
    reports = await collect(world, list(range(8)))
    assert [(report.task, report.attempts, report.reason) for report in reports] == [
        ("t1", 2, ""),
        ("t2", 1, ""),
        ("t3", 1, ""),
        ("t6", 3, "all right"),
        ("t7", 1, ""),
    ]
    assert world.by() == {"running": 16, "no_signal": 16}


async def test_closing_ends_what_is_in_flight_and_what_nobody_took() -> None:
    async def act(task: Task, session: Session) -> str:
        return await (hang() if task.id == "t3" else alternate(task, session))

    config = RolloutConfig(group_size=4, min_members=2, concurrency=16, groups_ahead=4)
    world = World(act, config=config)
    async with aclosing(world.factory.groups(itertools.count())) as reports:
        async for report in reports:
            assert report.group is not None
            world.store.put(report.group)
            if world.store.depth() == 2:
                break
    by = world.by()
    assert by["queued"] == 8
    assert set(by) <= {"queued", "surplus", "void"}
    assert by["void"] >= 4


async def test_one_in_five_fails_and_every_step_completes() -> None:
    """20 % injected exceptions of every kind, hangs and lost sandboxes among them."""
    dice = random.Random(7)
    kinds = [KeyError("bug"), SandboxLost("gone"), EngineClosed("closed"), TimeoutError("slow"), None]

    def fault() -> BaseException | str | None:
        return dice.choice(kinds) if dice.random() < 0.2 else "fine"

    async def act(task: Task, session: Session) -> str:
        await session.clock.sleep(dice.random())
        failure = fault()
        if failure is None:
            await hang()
        if isinstance(failure, BaseException):
            raise failure
        return str(dice.randrange(2))

    def make(owner: str) -> None:
        if dice.random() < 0.02:
            raise SandboxLost("no zygote")

    def grade(rollout: Rollout) -> object:
        if dice.random() < 0.02:
            raise ValueError("judge")
        return hang() if dice.random() < 0.01 else None

    config = RolloutConfig(group_size=8, min_members=4, concurrency=64, max_regroups=0)
    world = World(act, reward=Values(grade), config=config, sandboxes=MemorySandboxes(make))
    reports = await collect(world, list(range(60)))
    assert len(reports) == 60
    for report in reports:
        if report.group is not None:
            assert len(report.group.members) >= 4
            assert world.store.put(report.group)
    by = world.by()
    assert set(by) <= {"queued", "void", "unscorable", "no_signal"}
    assert by["void"] > 50 and by["unscorable"] > 3 and by["queued"] > 400
    outcomes = Counter(event.outcome for event in world.of(RolloutEnded) if event.value is None)
    assert set(outcomes) >= {"error", "sandbox_lost", "engine_error", "rollout_timeout", "answered"}
    stats = world.factory.stats()
    assert stats.rollouts == world.store.counts().started
    assert stats.voided == by["void"]
    assert stats.unscorable == by["unscorable"]
    assert stats.scored == stats.rollouts - stats.voided - stats.unscorable
    assert len(world.of(GroupEnded)) == 60


# Evaluation.


async def test_an_evaluation_is_in_order_and_outside_the_statistics() -> None:
    async def act(task: Task, session: Session) -> str:
        await session.clock.sleep(10.0 - int(task.id[1:]))
        if task.id == "t3" and place(session)[1] == 0:
            raise SandboxLost("gone")
        if task.id == "t4":
            raise SandboxLost("gone for good")
        return str(int(task.id[1:]) % 2)

    world = World(act)
    sampling = Sampling(temperature=0.0, seed=3)
    scored = await world.factory.evaluate(
        [task(i) for i in range(6)], sampling, label="before", concurrency=3
    )
    assert [each.score.value for each in scored] == [0.0, 1.0, 0.0, 1.0, None, 1.0]
    assert [each.rollout.identity.task for each in scored] == [f"t{i}" for i in range(6)]
    assert scored[4].rollout.outcome is Outcome.SANDBOX_LOST
    assert world.by() == {"evaluated": 5, "void": 4}
    assert world.factory.stats().rollouts == 0
    with pytest.raises(StoreError):
        await world.factory.evaluate([task(0)], sampling, label="before")


async def test_a_cancelled_evaluation_ends_everywhere() -> None:
    async def act(task: Task, session: Session) -> str:
        return "1" if task.id == "t0" else await hang()

    world = World(act)
    running = asyncio.ensure_future(
        world.factory.evaluate([task(i) for i in range(3)], Sampling(), label="after")
    )
    await rounds(100)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.by() == {"evaluated": 1, "void": 2}


async def test_a_run_repeats() -> None:
    async def act(task: Task, session: Session) -> str:
        seen.append((session.identity.rollout, session.sampling, session.trace))
        return await alternate(task, session)

    runs = []
    for _ in range(2):
        seen: list[object] = []
        await World(act).factory.group(task(0), "g0")
        runs.append(seen)
    assert runs[0] == runs[1]


def test_a_configuration_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="min_members 5 exceeds group_size 4"):
        RolloutConfig(group_size=4, min_members=5)
