"""Factory, agent, door, sandboxes and reward together: a clumsy policy works on `records` with real tools.

The policy mixes right hops with stale keys, malformed calls, turns without end and stray control tokens.
"""

import random
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from rollwright.agents.calls import render
from rollwright.agents.config import AgentConfig
from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.buffer.memory import MemoryStore
from rollwright.clock import SystemClock
from rollwright.events import ListSink, RolloutEnded, SpanEnded
from rollwright.guard.audit import AuditLog, verify
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.reward.config import RewardConfig
from rollwright.rollout.config import RolloutConfig
from rollwright.rollout.factory import RolloutFactory
from rollwright.sandbox.local import ProcessProvider
from rollwright.tasks.base import Demonstration
from rollwright.tasks.config import HabitsConfig, RecordsConfig
from rollwright.tasks.records import TABLE_OF, Records
from rollwright.testing.archives import NoArchive
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.tools.door import ToolDoor
from rollwright.tools.python import PythonTool
from rollwright.tools.registry import ToolRegistry
from rollwright.tools.sql import SqlTool
from rollwright.types import (
    AnswerEquals,
    CallsSucceed,
    CallStatus,
    Completion,
    Environment,
    Group,
    Identity,
    Message,
    PolicyVersion,
    Provenance,
    Sampling,
    Scored,
    Task,
    TaskLimits,
    ToolCall,
    TwinReplay,
    ValuesSeen,
)

RECORDS = Records(RecordsConfig())
CODEC = PieceTokenizer(RECORDS.pieces(), CONTROL)
TEMPLATE = PieceTemplate(CODEC)
SQL = SqlTool().spec
VERSION = PolicyVersion(run="run")


class Recorded(ScriptedEngine):
    """Keeps every completion it gave, by request."""

    completions: dict[str, Completion]

    async def generate(self, prompt, sampling, *, request, session=""):  # type: ignore[no-untyped-def]
        self.prompts[request] = prompt.copy()
        self.completions[request] = await super().generate(prompt, sampling, request=request, session=session)
        return self.completions[request]


class Clumsy:
    """Does the next hop, more or less."""

    def __init__(self, seed: int, clumsiness: float) -> None:
        self.dice = random.Random(seed)
        self.clumsiness = clumsiness

    def __call__(self, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        ids = self.say(CODEC.decode(prompt))
        return ids, [self.dice.uniform(-4, 0) for _ in ids]

    def say(self, text: str) -> list[int]:
        question = text.partition("<|user|>")[2].partition("<|end|>")[0]
        start, *relations = question.rstrip("?").split("'s ")
        told = [part.partition("<|end|>")[0] for part in text.split("<|tool|>")[1:]]
        names = [start, *(name for name in told if " " not in name and name != "none")]
        if len(names) > len(relations):
            return TEMPLATE.say_answer(names[-1]).tolist()
        relation = relations[len(names) - 1]
        if self.dice.random() < self.clumsiness:
            return self.blunder(relation, start)
        return self.ask(relation, names[-1])

    def ask(self, relation: str, name: str) -> list[int]:
        query = f"SELECT {relation} FROM {TABLE_OF[relation]} WHERE name='{name}'"
        return TEMPLATE.say_call(
            render(ToolCall(id="", name="sql", arguments={"query": query}), SQL)
        ).tolist()

    def blunder(self, relation: str, start: str) -> list[int]:
        open, close, end, tool = (CODEC.control(c) for c in ("<call>", "</call>", "<|end|>", "<|tool|>"))
        good = self.ask(relation, start)
        return self.dice.choice(
            [
                good,  # a stale key
                good[:-1],  # the call is whole, the turn is not
                good[:-2],  # cut inside the call
                [open, *good],
                [open, close, end],
                [open, *CODEC.encode('sql {"query": 1}'), close, end],
                [open, *CODEC.encode("rm -rf"), close, end],
                [tool, *CODEC.encode("bada"), end],
                [int(self.dice.random() * CODEC.size) for _ in range(5)],
                TEMPLATE.say_answer(start).tolist(),
            ]
        )


class World:
    """Everything real but the model."""

    def __init__(self, folder: Path, engine: ScriptedEngine, tools: list[object] | None = None) -> None:
        clock = SystemClock()
        self.engine, self.events, self.store = engine, ListSink(), MemoryStore(1000)
        self.sandboxes = ProcessProvider(folder / "sandboxes", unsafe=True, max_live=16)
        self.audit = AuditLog(folder / "audit.jsonl", clock)
        registry = ToolRegistry(tools or [SqlTool()])  # type: ignore[arg-type]
        self.door = ToolDoor(registry, GuardChain([AllowList()]), self.audit, clock=clock, events=self.events)
        self.factory = RolloutFactory(
            tasks=RECORDS,
            agent=AgentConfig().build(),
            engine=engine,
            door=self.door,
            sandboxes=self.sandboxes,
            reward=RewardConfig().build(self.sandboxes, clock),
            archive=NoArchive(),
            ledger=self.store,
            codec=CODEC,
            template=TEMPLATE,
            clock=clock,
            events=self.events,
            config=RolloutConfig(group_size=8, concurrency=8, max_regroups=0),
            identity=Identity(run="run"),
            rng=random.Random(0),
        )

    async def __aenter__(self) -> "World":
        await self.sandboxes.start()
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await self.sandboxes.close()
        self.audit.close()


def engine_of(policy: object) -> Recorded:
    engine = Recorded(policy, version=VERSION, vocab=CODEC.size)  # type: ignore[arg-type]
    engine.prompts, engine.completions = {}, {}  # type: ignore[attr-defined]
    return engine


async def test_a_clumsy_policy_leaves_exact_rows_and_a_balanced_ledger(tmp_path: Path) -> None:
    world = World(tmp_path, engine_of(Clumsy(3, clumsiness=0.25)))
    groups: list[Group] = []
    async with world, aclosing(world.factory.groups(iter(range(24)))) as reports:
        async for report in reports:
            assert report.voided == 0, world.events.events
            if report.group is not None:
                assert world.store.put(report.group)
                groups.append(report.group)
        assert world.sandboxes.live == 0
    members = [member for group in groups for member in group.members]
    assert len(members) >= 100
    for member in members:
        check_exact(member, world.engine)
    counts = world.store.counts()
    assert counts.balanced
    assert counts.by["queued"] == len(members)
    assert counts.started == 24 * 8 == sum(isinstance(event, RolloutEnded) for event in world.events.events)
    statuses = Counter(r.status for m in members for turn in m.rollout.turns for r in turn.results)
    assert {CallStatus.OK, CallStatus.MALFORMED, CallStatus.DENIED} <= set(statuses)
    assert any(Provenance.INJECTED in m.rollout.rows[0].provenance for m in members)
    check_rewards(members)
    check_traces(members, world)
    assert verify(tmp_path / "audit.jsonl") is None


def check_exact(member: Scored, engine: Recorded) -> None:
    """Ids, logprobs and versions of the row are those of the completions; each prompt is the row so far."""
    (row,), rollout = member.rollout.rows, member.rollout.identity.rollout
    for number, turn in enumerate(member.rollout.turns):
        given = engine.completions[f"{rollout}/{number}"]
        prompt = engine.prompts[f"{rollout}/{number}"]  # type: ignore[attr-defined]
        assert np.array_equal(row.tokens[: turn.start], prompt)
        assert np.array_equal(row.tokens[turn.start : turn.end], given.tokens)
        assert np.array_equal(row.logprobs[turn.start : turn.end], given.logprobs)
    sampled = sum(turn.end - turn.start for turn in member.rollout.turns)
    assert row.sampled.sum() == sampled == sum(span.end - span.start for span in row.spans)
    assert {span.version for span in row.spans} == {VERSION}


def check_rewards(members: list[Scored]) -> None:
    """Worth 1 exactly where the calls that worked follow the chain and its end is the answer."""
    values = Counter()
    for member in members:
        task = RECORDS.task("train", int(member.rollout.identity.task.rpartition("/")[2]))
        seen = [r.content for turn in member.rollout.turns for r in turn.results if r.status is CallStatus.OK]
        values[member.score.value] += 1
        if member.score.value == 1.0:
            chain = [part.value for part in member.score.parts]
            assert chain == [1.0] * 4
            assert member.rollout.answer == seen[-1] == _answer(task)
    assert set(values) == {0.0, 1.0}
    assert values[1.0] > 20


def _seen(task: Task) -> list[str]:
    return [value for check in task.checks if isinstance(check, ValuesSeen) for value in check.values]


def _answer(task: Task) -> str:
    return next(check.expected for check in task.checks if isinstance(check, AnswerEquals))


def check_traces(members: list[Scored], world: World) -> None:
    """From a rollout's trace id one finds its turns and its calls."""
    spans: dict[str, Counter[str]] = {}
    for event in world.events.events:
        if isinstance(event, SpanEnded):
            spans.setdefault(event.trace, Counter())[event.name.partition(":")[0]] += 1
    for member in members:
        found = spans[member.rollout.identity.trace]
        assert found["model_turn"] == len(member.rollout.turns)
        assert found["rollout"] == 1


class Follow:
    """Says what a demonstration says."""

    def __init__(self, scripts: dict[str, Demonstration]) -> None:
        self.scripts = scripts

    def __call__(self, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        text = CODEC.decode(prompt)
        script = self.scripts[text.partition("<|user|>")[2].partition("<|end|>")[0]]
        turn = text.count("<|tool|>")
        if turn < len(script.calls):
            ids = TEMPLATE.say_call(render(script.calls[turn], SQL)).tolist()
        else:
            ids = TEMPLATE.say_answer(script.answer).tolist()
        return ids, [0.0] * len(ids)


async def test_what_a_demonstration_is_told_is_what_the_real_tool_says(tmp_path: Path) -> None:
    records = Records(RecordsConfig(habits=HabitsConfig(stale=0.4, table=0.1)))
    tasks = [records.task("train", number) for number in range(60)]
    scripts = [records.demonstrate(task, 0) for task in tasks]
    by_question = {task.messages[1].content: script for task, script in zip(tasks, scripts, strict=True)}
    async with World(tmp_path, engine_of(Follow(by_question))) as world:
        scored = await world.factory.evaluate(tasks, Sampling(temperature=0.0), label="scripts")
    kinds, right = Counter(), 0
    for task, script, member in zip(tasks, scripts, scored, strict=True):
        told = tuple(r.content for turn in member.rollout.turns for r in turn.results)
        assert told == script.observations
        assert member.rollout.answer == script.answer
        followed = [*_seen(task), _answer(task)] == list(told)
        # One may follow by luck, with a stale key that leads to the same name; the twin tells them apart.
        assert followed or member.score.value == 0.0
        right += member.score.value == 1.0
        kinds.update("error" if each.startswith("error") else each == "none" for each in told)
    assert len(kinds) == 3  # names, nothing, errors
    assert right > 5


CONSTANT = "try:\n    import nosuch\nexcept Exception:\n    pass\nprint('{answer}')"
HONEST = (
    "import sqlite3\n"
    "db = sqlite3.connect('data.db')\n"
    "total = db.execute(\"SELECT sum(amount) FROM sales WHERE who='{who}'\").fetchone()[0]\n"
    "print(total)"
)


@pytest.mark.parametrize(("code", "value"), [(CONSTANT, 0.0), (HONEST, 1.0)])
async def test_a_program_that_swallows_everything_and_prints_a_constant_is_worth_0(
    tmp_path: Path, code: str, value: float
) -> None:
    def sales(who: str, *amounts: int) -> Environment:
        rows = ", ".join(f"('{who}', {amount})" for amount in amounts)
        return Environment(
            sql=f"CREATE TABLE sales (who TEXT, amount INTEGER); INSERT INTO sales VALUES {rows};"
        )

    task = Task(
        id="sales/0",
        set="sales",
        messages=(Message(role="user", content="How much did Ada sell?"),),
        tools=("python",),
        checks=(
            CallsSucceed(),
            AnswerEquals(expected="42"),
            TwinReplay(environment=sales("Cy", 3, 4), renamed={"Ada": "Cy"}, expected="7"),
        ),
        environment=sales("Ada", 40, 2),
        limits=TaskLimits(max_tokens=1000, turn_tokens=400),
    )

    def policy(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        if CODEC.control("<|tool|>") in prompt:
            ids = TEMPLATE.say_answer("42").tolist()
        else:
            ids = TEMPLATE.say_call("python " + code.format(answer="42", who="Ada")).tolist()
        return ids, [0.0] * len(ids)

    async with World(tmp_path, engine_of(policy), [PythonTool()]) as world:
        (scored,) = await world.factory.evaluate([task], Sampling(), label="exploit")
    assert scored.rollout.turns[0].results[0].content == "42"
    assert scored.score.value == value, scored.score
    assert [part.value for part in scored.score.parts] == [1.0, 1.0, value]
