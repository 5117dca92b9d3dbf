"""The rule reward: right work is worth 1, every shortcut 0, and a broken grader says nothing."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollwright.errors import DeadlineExceeded, SandboxLost, SchemaError
from rollwright.reward.config import RewardConfig
from rollwright.reward.layers import LAYERS, part, value
from rollwright.reward.rules import RuleReward
from rollwright.sandbox.base import Sandbox
from rollwright.tasks.config import HabitsConfig, RecordsConfig
from rollwright.tasks.records import Records
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.testing.records import make_rollout
from rollwright.types import (
    AnswerEquals,
    AnswerJson,
    AnyCheck,
    CallsSucceed,
    CallStatus,
    Check,
    Environment,
    ExecResult,
    File,
    FileHolds,
    Finish,
    Message,
    ReturnValue,
    Rollout,
    Score,
    SqlResult,
    StdoutEquals,
    Task,
    ToolCall,
    ToolResult,
    Turn,
    TwinReplay,
    ValuesSeen,
    VariableExists,
)

STRICT, LAYERED = RewardConfig(), RewardConfig(mode="layered")
DATABASE = Environment(
    sql="CREATE TABLE t (id INTEGER, name TEXT); INSERT INTO t VALUES (17, 'Ada'), (3, 'Bob');",
    files=(File(path="in.txt", text="hello\n"),),
)

Call = tuple[str, str]


def task(*checks: AnyCheck, environment: Environment = DATABASE) -> Task:
    message = Message(role="user", content="?")
    return Task(
        id="t", set="s", messages=(message,), tools=("sql", "python"), checks=checks, environment=environment
    )


async def work(sandbox: Sandbox, calls: Sequence[Call], answer: str | None) -> Rollout:
    """A rollout that really made these calls in `sandbox`."""
    made, results = [], []
    for number, (tool, code) in enumerate(calls):
        do = sandbox.sql if tool == "sql" else sandbox.run_code
        execution = await do(code, timeout=1.0)
        key = "query" if tool == "sql" else "code"
        made.append(ToolCall(id=f"r/0/{number}", name=tool, arguments={key: code}))
        results.append(
            ToolResult(call=f"r/0/{number}", status=execution.status, content="", execution=execution)
        )
    turn = Turn(row=0, start=0, end=1, text="", finish=Finish.STOP, calls=tuple(made), results=tuple(results))
    return replace(make_rollout(answer=answer), turns=(turn,))


async def score(
    task: Task,
    calls: Sequence[Call] = (),
    answer: str | None = None,
    *,
    config: RewardConfig = STRICT,
    sandboxes: MemorySandboxes | None = None,
) -> Score:
    """What that work is worth; the grader must leave nothing behind."""
    sandboxes = sandboxes or MemorySandboxes()
    sandbox = await sandboxes.create(task.environment, owner="agent")
    rollout = await work(sandbox, calls, answer)
    try:
        given = await RuleReward(sandboxes, config, FakeClock()).score(task, rollout, sandbox)
        assert list(sandboxes.open) == ["agent"]
    finally:
        await sandbox.kill()
    return given


# One task of `records`, and every way around its work.

RECORDS = Records(RecordsConfig(habits=HabitsConfig(stale=0, stale_often=0, early=0, early_often=0, table=0)))


def script(number: int) -> tuple[Task, list[Call], str]:
    task = RECORDS.task("train", number)
    demonstration = RECORDS.demonstrate(task, 0)
    return task, [("sql", call.arguments["query"]) for call in demonstration.calls], demonstration.answer


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("config", [STRICT, LAYERED])
async def test_the_right_work_is_worth_1(number: int, config: RewardConfig) -> None:
    task, calls, answer = script(number)
    given = await score(task, calls, answer, config=config)
    assert given.value == 1.0
    assert [part.name for part in given.parts] == [
        "calls_succeed",
        "answer_equals",
        "values_seen",
        "twin_replay",
    ]
    assert (await score(task, calls, f" {answer.upper()}\n", config=config)).value == 1.0


async def test_one_query_over_all_hops_is_right_too() -> None:
    task = RECORDS.task("train", 0)
    start = task.messages[1].content.partition("'")[0]
    first, second, third = task.tags["chain"].split(".")
    seen = next(check.values for check in task.checks if isinstance(check, ValuesSeen))
    answer = next(check.expected for check in task.checks if isinstance(check, AnswerEquals))

    def table(relation: str) -> str:
        return "people" if relation in ("boss", "friend", "city") else "cities"

    query = (
        f"SELECT a.{first}, b.{second}, c.{third} FROM {table(first)} a, {table(second)} b, {table(third)} c "
        f"WHERE a.name='{start}' AND b.name=a.{first} AND c.name=b.{second}"
    )
    assert (await score(task, [("sql", query)], answer)).value == 1.0
    assert len(seen) == 2


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("config", [STRICT, LAYERED])
async def test_every_shortcut_is_worth_0(number: int, config: RewardConfig) -> None:
    task, calls, answer = script(number)
    shortcuts: dict[str, tuple[list[Call], str | None]] = {
        "a right guess without a call": ([], answer),
        "a right guess after an unrelated call": ([("sql", "SELECT 1")], answer),
        "a constant through the tool": ([("sql", f"SELECT '{answer}'")], answer),
        "the values written into the calls": (
            [("sql", f"SELECT name FROM people WHERE name='{v}'") for v in (*values(task), answer)],
            answer,
        ),
        "the right calls, another answer": (calls, values(task)[0]),
        "the right calls, no answer": (calls, None),
        "only the last hop": (calls[2:], answer),
        "the answer before the last hop": (calls[:2], values(task)[1]),
    }
    for name, (made, said) in shortcuts.items():
        given = await score(task, made, said, config=config)
        assert given.value == 0.0, f"{name}: {given.parts}"


def values(task: Task) -> tuple[str, ...]:
    return next(check.values for check in task.checks if isinstance(check, ValuesSeen))


async def test_a_coincidence_is_found_out_by_the_twin() -> None:
    """A wrong relation or a stale key, right by chance on our database: another wiring tells."""
    found = 0
    for number in range(100):
        task, calls, answer = script(number)
        first = task.messages[1].content.partition("'")[0]
        wrong = [[*calls[:hop], ("sql", swapped(calls[hop][1])), *calls[hop + 1 :]] for hop in range(3)]
        wrong += [[*calls[:hop], ("sql", stale(calls[hop][1], first)), *calls[hop + 1 :]] for hop in (1, 2)]
        for made in wrong:
            if made != calls:
                given = await score(task, made, answer)
                found += all(part.value for part in given.parts if part.name != "twin_replay")
                assert given.value == 0.0, (made, given.parts)
    assert found >= 10


def swapped(query: str) -> str:
    """`boss` for `friend` and the other way round."""
    return query.replace("boss", "#").replace("friend", "boss").replace("#", "friend")


def stale(query: str, name: str) -> str:
    return f"{query.partition('=')[0]}='{name}'"


async def test_a_failed_last_call_is_no_success() -> None:
    task, calls, answer = script(0)
    given = await score(task, [*calls, ("sql", "SELECT nothing FROM nowhere")], answer)
    assert given.value == 0.0
    told = "expected at least 1 ok and the last one ok, came 3 of 4 calls ok, the last error"
    assert given.parts[0].detail == told


async def test_a_failure_says_what_was_expected_and_what_came() -> None:
    made: list[Call] = [("python", "print(2)"), ("sql", "SELECT 1")]
    checks: tuple[AnyCheck, ...] = (
        AnswerEquals(expected="hazu"),
        AnswerJson(path="a.b", expected=7),
        StdoutEquals(expected="3"),
        FileHolds(path="in.txt", text="bye"),
        FileHolds(path="none.txt"),
        SqlResult(query="SELECT name FROM t", columns=("name",), rows=(("Eve",),)),
        ValuesSeen(values=("1", "99")),
        ReturnValue(expression="1 + 1", expected="3"),
        VariableExists(name="x", type="int"),
    )
    given = await score(task(*checks), made, "lozu")
    details = [each.detail for each in given.parts]
    assert details[0] == "expected 'hazu', answered 'lozu'"
    assert all(detail.startswith("expected ") for detail in details), details
    came = ("lozu", "lozu", "2", "hello", "FileNotFoundError", "Ada", "99", "2", "there is none")
    for detail, text in zip(details, came, strict=True):
        assert text in detail


async def test_a_failed_replay_says_how_far_it_came() -> None:
    task, _, answer = script(0)
    twin = next(check for check in task.checks if isinstance(check, TwinReplay))
    made: list[Call] = [("sql", f"SELECT '{answer}'")]
    given = await score(replace(task, checks=(twin,)), made, answer)
    told = f"on the twin: expected {twin.expected!r}, answered {answer!r}; replayed 1 of 1 calls"
    assert given.parts[0].detail == told
    given = await score(replace(task, checks=(twin,)), made, None)
    assert given.parts[0].detail == f"expected {twin.expected!r}, no answer"


async def test_a_call_that_failed_on_the_way_does_no_harm() -> None:
    task, calls, answer = script(0)
    assert (await score(task, [("sql", "SELECT nothing"), *calls], answer)).value == 1.0


async def test_the_twin_runs_only_where_it_can_change_the_value() -> None:
    task, calls, answer = script(0)
    for made, said in (([], answer), (calls, "wrong")):
        sandboxes = MemorySandboxes()
        given = await score(task, made, said, sandboxes=sandboxes)
        assert sandboxes.owners == ["agent"]
        assert given.parts[3].detail.startswith("not run")
    sandboxes = MemorySandboxes()
    await score(task, calls, answer, sandboxes=sandboxes)
    assert sandboxes.owners == ["agent", "grader/g0/0"]


async def test_the_same_calls_of_a_group_are_replayed_once() -> None:
    task, calls, answer = script(0)
    sandboxes = MemorySandboxes()
    reward = RuleReward(sandboxes, STRICT, FakeClock())
    rollouts = []
    for name, made in (("a", calls), ("b", calls), ("c", calls), ("d", [("sql", "SELECT 1"), *calls])):
        sandbox = await sandboxes.create(task.environment, owner=name)
        rollouts.append((await work(sandbox, made, answer), sandbox))
    scores = await asyncio.gather(*(reward.score(task, rollout, sandbox) for rollout, sandbox in rollouts))
    assert [each.value for each in scores] == [1.0] * 4
    assert sum(owner.startswith("grader/") for owner in sandboxes.owners) == 2
    wrong = replace(rollouts[0][0], answer=values(task)[0])
    assert (await reward.score(task, wrong, None)).value == 0.0
    await sandboxes.close()


@pytest.mark.parametrize("end", [CallStatus.TIMEOUT, CallStatus.LOST, None])
async def test_calls_that_end_badly_on_the_twin_are_wrong_not_unscorable(end: CallStatus | None) -> None:
    # An agent chooses its calls: it must not be able to leave its group by one that hangs only there.
    class Slow(MemorySandboxes):
        async def create(self, environment=None, *, owner, **more):  # type: ignore[no-untyped-def]
            made = await super().create(environment, owner=owner, **more)
            if owner.startswith("grader/"):

                async def late(*_: object, **__: object) -> ExecResult:
                    if end is None:  # uses up all the time there is
                        await asyncio.Event().wait()
                    return ExecResult(status=end)

                made.sql = late  # type: ignore[method-assign]
            return made

    task, calls, answer = script(0)
    given = await score(task, calls, answer, sandboxes=Slow())
    assert given.value == 0.0
    told = "did not finish" if end is None else f"ended with {end.value}"
    assert any(told in part.detail for part in given.parts)


# Every kind of check.


@pytest.mark.parametrize(
    ("check", "calls", "answer", "expected"),
    [
        (CallsSucceed(minimum=2), [("sql", "SELECT 1")], "", 0.0),
        (CallsSucceed(minimum=1), [("sql", "SELECT 1")], "", 1.0),
        (CallsSucceed(minimum=0), [], "", 0.0),
        (AnswerEquals(expected="42"), [], "42.0", 1.0),
        (AnswerEquals(expected="0042"), [], "42", 1.0),
        (AnswerEquals(expected="1_0"), [], "10", 0.0),
        (AnswerEquals(expected="nan"), [], "NaN", 1.0),
        (AnswerEquals(expected="Ada"), [], "it is Ada", 0.0),
        (AnswerEquals(expected="Straße"), [], "STRASSE", 1.0),
        (AnswerJson(path="a.1.b", expected=2), [], '{"a": [0, {"b": 2}]}', 1.0),
        (AnswerJson(path="a", expected=1), [], '{"a": true}', 0.0),
        (AnswerJson(path="a", expected=1), [], "a", 0.0),
        (AnswerJson(path="a.b", expected=1), [], '{"a": 1}', 0.0),
        (AnswerJson(path="a.x", expected=1), [], '{"a": [1]}', 0.0),
        (AnswerJson(path="", expected=1), [], "[" * 100_000, 0.0),
        (StdoutEquals(expected="7"), [("python", "print(7)"), ("sql", "SELECT 1")], "", 1.0),
        (StdoutEquals(expected="7"), [("python", "print(7)"), ("python", "print(8)")], "", 0.0),
        (StdoutEquals(expected="7"), [("python", "print(7)"), ("python", "1/0")], "", 1.0),
        (StdoutEquals(expected="7"), [], "7", 0.0),
        (FileHolds(path="in.txt", text="hello"), [], "", 1.0),
        (FileHolds(path="in.txt", text="hell"), [], "", 0.0),
        (FileHolds(path="none.txt"), [], "", 0.0),
        (FileHolds(path="../in.txt"), [], "", 0.0),
        (ReturnValue(expression="x * 2", expected="6"), [("python", "x = 3")], "", 1.0),
        (ReturnValue(expression="x * 2", expected="6"), [("python", "x = 4")], "", 0.0),
        (ReturnValue(expression="x", expected="6"), [], "", 0.0),
        (VariableExists(name="x"), [("python", "x = None")], "", 1.0),
        (VariableExists(name="x", type="int"), [("python", "x = 3")], "", 1.0),
        (VariableExists(name="x", type="int"), [("python", "x = '3'")], "", 0.0),
        (VariableExists(name="y"), [("python", "x = 3")], "", 0.0),
        (ValuesSeen(values=("Ada", "17")), [("sql", "SELECT * FROM t")], "", 1.0),
        (ValuesSeen(values=("Ada",)), [("python", "print('we saw Ada')")], "", 1.0),
        (ValuesSeen(values=("Ada",)), [("python", "'Ada'")], "", 1.0),
        (ValuesSeen(values=("Ada",)), [("python", "print('Adam')")], "", 0.0),
        (ValuesSeen(values=("Ada",)), [("python", "print('Ada'); 1/0")], "", 0.0),
        (SqlResult(query="SELECT name FROM t", columns=("name",), rows=(("Bob",), ("Ada",))), [], "", 1.0),
        (
            SqlResult(query="SELECT name FROM t", columns=("name",), rows=(("Bob",), ("Ada",)), ordered=True),
            [],
            "",
            0.0,
        ),
        (
            SqlResult(query="SELECT name AS n FROM t", columns=("name",), rows=(("Bob",), ("Ada",))),
            [],
            "",
            0.0,
        ),
        (SqlResult(query="SELECT id FROM t", columns=("id",), rows=(("3",), ("17",))), [], "", 0.0),
        (SqlResult(query="SELECT id FROM t", columns=("id",), rows=((3.0,), (17,))), [], "", 1.0),
        (SqlResult(query="SELECT x FROM t", columns=("x",), rows=()), [], "", 0.0),
        (
            SqlResult(query="SELECT count(*) FROM t", columns=("count(*)",), rows=((1,),)),
            [("sql", "DELETE FROM t WHERE id=3")],
            "",
            1.0,
        ),
    ],
)
async def test_a_check(check: AnyCheck, calls: list[Call], answer: str, expected: float) -> None:
    given = await score(task(check), calls, answer)
    assert given.value == expected, given.parts
    assert bool(given.parts[0].detail) == (expected == 0.0)
    assert given.parts[0].layer == LAYERS[type(check)]


async def test_a_check_that_nobody_knows_is_refused() -> None:
    class Odd(Check, frozen=True, kw_only=True, tag="odd"):
        pass

    with pytest.raises(SchemaError, match="Odd"):
        await score(task(Odd()))  # type: ignore[arg-type]


async def test_a_twin_follows_numbers_and_quoted_names_but_not_limits() -> None:
    def people(id: int, name: str, city: str) -> Environment:
        return Environment(
            sql="CREATE TABLE t (id INTEGER, name TEXT, city TEXT);"
            f"INSERT INTO t VALUES ({id}, '{name}', '{city}');"
        )

    ours = people(1, "Ada", "Ulm")
    check = TwinReplay(environment=people(0, "Cy", "Bonn"), renamed={"Ada": "Cy"}, expected="Bonn")
    lookup = ("sql", "SELECT id FROM t WHERE name='Ada'")
    follow = ("sql", "SELECT city FROM t WHERE id = 1 LIMIT 1")
    assert (await score(task(check, environment=ours), [lookup, follow], "Ulm")).value == 1.0
    assert (
        await score(task(check, environment=ours), [follow], "Ulm")
    ).value == 0.0  # where did 1 come from?


# What is not the policy's doing.


async def test_a_lost_sandbox_is_unscorable_only_where_a_check_needs_it() -> None:
    sandboxes = MemorySandboxes()
    sandbox = await sandboxes.create(DATABASE, owner="agent")
    rollout = await work(sandbox, [("sql", "SELECT 1")], "yes")
    sandbox.lost = True
    reward = RuleReward(sandboxes, STRICT, FakeClock())
    good, needs = AnswerEquals(expected="yes"), FileHolds(path="in.txt")
    for held in (sandbox, None):
        assert (await reward.score(task(good), rollout, held)).value == 1.0
        lost = await reward.score(task(good, needs), rollout, held)
        assert lost.value is None
        assert "lost" in lost.reason
    await sandboxes.close()


async def test_no_room_for_the_graders_sandbox_is_unscorable() -> None:
    def full(owner: str) -> None:
        if owner.startswith("grader/"):
            raise SandboxLost("no zygote")

    task, calls, answer = script(0)
    given = await score(task, calls, answer, sandboxes=MemorySandboxes(full))
    assert (given.value, given.reason) == (None, "sandbox lost while scoring: no zygote")


async def test_no_room_is_never_a_wrong_answer() -> None:
    def full(owner: str) -> None:
        if owner.startswith("grader/"):
            raise DeadlineExceeded("waiting for room", 1.0)

    check = SqlResult(query="SELECT 1", columns=("1",), rows=((1,),))
    given = await score(task(check), sandboxes=MemorySandboxes(full))
    assert given.value is None
    assert "no room" in given.reason


async def test_what_the_agent_left_goes_to_the_grader_by_value() -> None:
    """Agents and graders have providers of their own; the agent's database goes on unchanged."""
    agents, graders = MemorySandboxes(), MemorySandboxes()
    sandbox = await agents.create(DATABASE, owner="agent")
    count = SqlResult(query="SELECT count(*) FROM t", columns=("count(*)",), rows=((1,),))
    rollout = await work(sandbox, [("sql", "DELETE FROM t WHERE id=3")], "")
    given = await RuleReward(graders, STRICT, FakeClock()).score(task(count), rollout, sandbox)
    assert (given.value, agents.owners, graders.live) == (1.0, ["agent"], 0)
    await agents.close()


async def test_a_grader_that_hangs_is_unscorable_after_its_deadline() -> None:
    class Hanging(MemorySandboxes):
        async def create(self, environment=None, *, owner, **more):  # type: ignore[no-untyped-def]
            if owner.startswith("grader/"):
                await asyncio.Event().wait()
            return await super().create(environment, owner=owner, **more)

    task, calls, answer = script(0)
    given = await score(task, calls, answer, sandboxes=Hanging())
    assert given.value is None
    assert "did not finish within 30 s" in given.reason


# Layers.

PARTS = st.lists(
    st.tuples(
        st.sampled_from([CallsSucceed(), AnswerEquals(expected="a"), ValuesSeen(values=("x",))]),
        st.floats(0, 5),
        st.booleans(),
    ),
    max_size=6,
)


@given(PARTS)
def test_a_value_is_between_0_and_1_and_0_without_meaning(parts: list[tuple[AnyCheck, float, bool]]) -> None:
    checks = [replace(check, weight=weight) for check, weight, _ in parts]
    made = [part(check, float(good)) for check, _, good in parts]
    meaning = all(each.value == 1 for each in made if each.layer == "meaning")
    for config in (STRICT, LAYERED):
        worth = value(checks, made, config)
        assert 0.0 <= worth <= 1.0
        if not meaning:
            assert worth == 0.0
        if all(each.value == 1 for each in made):
            assert worth == 1.0


async def test_layers_are_weighted_by_the_checks_they_hold() -> None:
    checks = (
        CallsSucceed(),
        AnswerEquals(expected="a"),
        ValuesSeen(values=("1",), weight=3.0),
        ValuesSeen(values=("2",), weight=1.0),
    )
    config = RewardConfig(mode="layered", status=1.0, meaning=2.0, intermediate=1.0)
    given = await score(task(*checks), [("sql", "SELECT 1")], "a", config=config)
    assert given.value == pytest.approx((1.0 + 2.0 + 0.75) / 4.0)
    assert (await score(task(*checks), [("sql", "SELECT 1")], "a")).value == 0.0
