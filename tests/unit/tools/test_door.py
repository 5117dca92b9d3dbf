"""The one door: its order, what it remembers, and that nothing an agent says makes it fall over."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.errors import DoorError, PluginError, SandboxLost, StoreError
from rollwright.events import ListSink, SpanEnded, TraceContext
from rollwright.guard.audit import AuditLog, verify
from rollwright.guard.base import Guard, GuardEvent
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.sandbox.base import Sandbox
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.tools.base import ERROR_CHARACTERS, Action, Arguments, SandboxHandle
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.tools.sealed import SealedTool
from rollwright.types import (
    CallStatus,
    Decision,
    Environment,
    Identity,
    Message,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Verdict,
)

TASK = Task(
    id="t",
    set="s",
    messages=(Message(role="user", content="?"),),
    tools=("sql", "python", "write_file", "read_file", "odd", "ghost"),
    checks=(),
    environment=Environment(
        sql="CREATE TABLE log(x); CREATE TABLE t(a,b); INSERT INTO t VALUES (1,'x'),(2,NULL)"
    ),
)
WHO = Identity(run="r", task="t", group="g", rollout="r1", trace="1" * 32)


class Odd(SealedTool):
    """Does what the test says."""

    spec = ToolSpec(name="odd", description="odd", parameters={"type": "object"})

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = 0
        self.answer: Any = None

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        self.entered += 1
        if arguments.get("wait"):
            await self.gate.wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is not None:
            return self.answer  # type: ignore[no-any-return]
        return ToolResult(
            call="whatever", status=CallStatus.OK, content=json.dumps(arguments, sort_keys=True)
        )


class Says:
    """A guard with one answer."""

    name = "says"

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.events: list[GuardEvent] = []

    async def check(self, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
        self.events.append(event)
        return self.verdict


class House:
    """A door with everything around it."""

    def __init__(self, folder: Path, sandbox: Sandbox, guard: Guard | None = None) -> None:
        self.odd, self.events, self.sandbox = Odd(), ListSink(), sandbox
        self.registry = ToolRegistry.installed()
        self.registry.register(self.odd)
        self.clock = FakeClock(auto=False)
        self.audit = AuditLog(folder / f"audit-{uuid.uuid4().hex}.jsonl", self.clock)
        self.door = ToolDoor(
            self.registry,
            guard or GuardChain([AllowList()]),
            self.audit,
            clock=self.clock,
            events=self.events,
        )

    def action(self, name: str, arguments: Any, id: str = "1", **changes: Any) -> Action:
        call = ToolCall(id=id, name=name, arguments=arguments)
        given: dict[str, Any] = {
            "call": call,
            "identity": WHO,
            "task": TASK,
            "sandbox": SandboxHandle(self.sandbox),
            "trace": TraceContext("1" * 32, "2" * 16),
            "timeout": 5.0,
        }
        return Action(**{**given, **changes})

    async def __call__(self, name: str, arguments: Any, id: str = "1", **changes: Any) -> ToolResult:
        return await self.door.invoke(self.action(name, arguments, id, **changes))

    def entries(self) -> list[dict[str, Any]]:
        assert verify(self.audit.path) is None
        return [msgspec.json.decode(line)["entry"] for line in self.audit.path.read_bytes().splitlines()]


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    provider = MemorySandboxes()
    yield await provider.create(TASK.environment, owner="r1")
    await provider.close()


@pytest.fixture
async def house(tmp_path: Path, sandbox: Sandbox) -> AsyncIterator[House]:
    built = House(tmp_path, sandbox)
    yield built
    built.audit.close()


async def rows(sandbox: Sandbox) -> int:
    found = await sandbox.sql("SELECT count(*) FROM log", timeout=1)
    assert found.rows is not None
    return int(found.rows.rows[0][0])


@pytest.mark.parametrize(
    ("tool", "arguments", "content"),
    [
        ("sql", {"query": "SELECT a FROM t WHERE b='x'"}, "1"),
        ("sql", {"query": "SELECT a, b FROM t"}, "1|x\n2|NULL"),
        ("sql", {"query": "SELECT a FROM t WHERE a > 9"}, "none"),
        ("sql", {"query": "INSERT INTO log VALUES (1)"}, "none"),
        ("sql", {"query": "SELECT * FROM nope"}, "error: no such table: nope"),
        ("python", {"code": "print('hi')\n7"}, "hi"),
        ("python", {"code": "6*7"}, "42"),
        ("python", {"code": "x = 1"}, "none"),
        ("python", {"code": "1/0"}, "error: ZeroDivisionError: division by zero"),
        ("read_file", {"path": "../x"}, "error: expected a relative path below the working folder"),
        ("write_file", {"path": "a", "text": "b"}, "ok"),
        ("odd", {"a": 1}, '{"a": 1}'),
        ("ghost", {}, "error: no tool 'ghost'"),
        ("shell", {"argv": ["ls"]}, "error: denied by allow-list: no tool 'shell' here"),
        ("sqk", {}, "error: denied by allow-list: no tool 'sqk' here; did you mean 'sql'?"),
        ("sql", {}, 'error: "query" is a required property'),
        ("sql", {"query": 7}, 'error: query: 7 is not of type "string"'),
    ],
)
async def test_observations(house: House, tool: str, arguments: Any, content: str) -> None:
    assert (await house(tool, arguments)).content == content


@pytest.mark.parametrize(
    "arguments",
    [
        '{"query": "SELECT 1"}',
        [],
        7,
        None,
        "",
        {},
        {"query": None},
        {"query": "\ud800"},
        {1: 2},
        {"query": {1, 2}},
    ],
)
async def test_arguments_of_any_kind_are_observations(house: House, arguments: Any) -> None:
    result = await house("sql", arguments)
    assert result.status in (CallStatus.MALFORMED, CallStatus.ERROR)
    assert len(result.content) <= ERROR_CHARACTERS and "\n" not in result.content


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(["sql", "python", "ghost", "shell", "", "\ud800"]), arguments=JSON)
def test_nothing_said_makes_the_door_fall_over(tmp_path: Path, name: str, arguments: Any) -> None:
    async def run() -> None:
        provider = MemorySandboxes()
        house = House(tmp_path, await provider.create(TASK.environment, owner="r1"))
        result = await house(name, arguments)
        assert result.call == "1" and result.content
        assert [entry["kind"] for entry in house.entries()] == ["asked", "decided", "done"]
        house.audit.close()
        await provider.close()

    asyncio.run(run())


async def test_a_deep_argument_is_an_observation(house: House) -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"query": deep}
    assert (await house("sql", deep)).status is CallStatus.MALFORMED


@pytest.mark.parametrize("field", ["run", "task", "rollout", "trace"])
async def test_no_action_without_identity(house: House, field: str) -> None:
    identity = msgspec.structs.replace(WHO, **{field: ""})
    with pytest.raises(DoorError, match=field):
        await house("sql", {"query": "INSERT INTO log VALUES (1)"}, identity=identity)
    with pytest.raises(DoorError, match="task"):
        await house("sql", {"query": "SELECT 1"}, task=msgspec.structs.replace(TASK, id="other"))
    assert await rows(house.sandbox) == 0 and house.entries() == []


async def test_an_action_id_has_its_effect_once_even_while_in_flight(house: House) -> None:
    insert = {"query": "INSERT INTO log VALUES (1)"}
    results = await asyncio.gather(*(house("sql", insert) for _ in range(20)))
    assert await rows(house.sandbox) == 1
    assert sorted(result.repeated for result in results) == [False] + [True] * 19
    waiting = [asyncio.create_task(house("odd", {"wait": True}, id="2")) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert house.odd.entered == 1
    house.odd.gate.set()
    assert [(await each).content for each in waiting] == ['{"wait": true}'] * 3
    again = await house("sql", {"query": "INSERT INTO log VALUES (2)"})
    assert (again.status, await rows(house.sandbox)) == (CallStatus.MALFORMED, 1)
    await house("sql", insert, id="3")
    await house("sql", insert, identity=msgspec.structs.replace(WHO, rollout="r2"))
    await house("sql", insert, identity=msgspec.structs.replace(WHO, attempt=1))
    assert await rows(house.sandbox) == 4


async def test_a_cancelled_action_is_not_run_again(house: House) -> None:
    first = asyncio.create_task(house("odd", {"wait": True}))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    again = await house("odd", {"wait": True})
    assert (again.status, again.repeated, house.odd.entered) == (CallStatus.LOST, True, 1)
    assert [e["body"]["status"] for e in house.entries() if e["kind"] == "done"] == ["cancelled", "lost"]


async def test_a_slow_tool_delays_nobody_and_is_cut_off(house: House) -> None:
    slow = asyncio.create_task(house("odd", {"wait": True}, timeout=2.0))
    await asyncio.sleep(0.01)
    assert (await house("sql", {"query": "SELECT 1"}, id="2")).content == "1"
    assert not slow.done()
    house.clock.advance(3.5)
    result = await slow
    assert (result.status, result.content) == (CallStatus.TIMEOUT, "error: timeout")


async def test_a_tool_that_breaks_its_promise_is_an_observation(house: House) -> None:
    for number, answer in enumerate([ValueError("broken\nbadly"), "text", KeyError("x" * 500)]):
        house.odd.answer = answer
        result = await house("odd", {}, id=str(number))
        assert result.status is CallStatus.ERROR and result.call == str(number)
        assert len(result.content) <= ERROR_CHARACTERS and "\n" not in result.content


async def test_a_lost_sandbox_is_no_observation(house: House) -> None:
    house.odd.answer = SandboxLost("gone")
    for _ in range(2):  # the second asks for the first one's result
        with pytest.raises(SandboxLost):
            await house("odd", {})
    assert house.odd.entered == 1
    assert house.entries()[-1]["body"]["status"] == "lost"


async def test_denied_and_terminated_never_run(tmp_path: Path, sandbox: Sandbox) -> None:
    for decision in (Decision.CONFIRM, Decision.DENY, Decision.TERMINATE):
        house = House(tmp_path, sandbox, Says(Verdict(decision=decision, rule="rule-7", reason="because")))
        result = await house("sql", {"query": "INSERT INTO log VALUES (1)"})
        assert result.status is CallStatus.DENIED and "rule-7" in result.content
        assert result.terminated is (decision is Decision.TERMINATE)
        assert [entry["kind"] for entry in house.entries()] == ["asked", "decided", "done"]
        house.audit.close()
    assert await rows(sandbox) == 0


async def test_modified_arguments_are_the_ones_that_run(tmp_path: Path, sandbox: Sandbox) -> None:
    for arguments, status in (({"query": "SELECT 'safe'"}, CallStatus.OK), ({"q": 1}, CallStatus.MALFORMED)):
        verdict = Verdict(decision=Decision.MODIFY, rule="m", arguments=arguments)
        house = House(tmp_path, sandbox, Says(verdict))
        result = await house("sql", {"query": "INSERT INTO log VALUES (1)"})
        assert result.status is status
        assert result.content in ("safe", "error: Additional properties are not allowed ('q' was unexpected)")
        house.audit.close()
    assert await rows(sandbox) == 0


@pytest.mark.parametrize("guard", ["crash", "hang", "nonsense"])
async def test_a_guard_that_fails_denies(tmp_path: Path, sandbox: Sandbox, guard: str) -> None:
    class Broken:
        name = "broken"

        async def check(self, event: GuardEvent, history: Sequence[ToolCall]) -> Verdict:
            if guard == "crash":
                raise RuntimeError("boom")
            if guard == "hang":
                await asyncio.Event().wait()
            return True  # type: ignore[return-value]

    house = House(tmp_path, sandbox, Broken())
    house.door._guard_timeout = 0.02
    result = await house("sql", {"query": "INSERT INTO log VALUES (1)"})
    assert result.status is CallStatus.DENIED and "broken/failed" in result.content
    assert await rows(sandbox) == 0
    house.audit.close()


async def test_asked_is_written_before_anything_runs(tmp_path: Path, sandbox: Sandbox) -> None:
    class Full:
        def append(self, kind: str, identity: Identity, call: str, body: dict[str, Any]) -> str:
            raise StoreError("disk full")

    door = ToolDoor(ToolRegistry.installed(), GuardChain([AllowList()]), Full())
    action = House(tmp_path, sandbox).action("sql", {"query": "INSERT INTO log VALUES (1)"})
    with pytest.raises(StoreError):
        await door.invoke(action)
    assert await rows(sandbox) == 0


async def test_audit_and_span_tell_the_same_call(house: House) -> None:
    await house("sql", {"query": "SELECT 1"})
    asked, decided, done = house.entries()
    assert (asked["body"]["tool"], json.loads(asked["body"]["arguments"])) == ("sql", {"query": "SELECT 1"})
    assert decided["body"]["decision"] == "allow" and decided["body"]["rule"] == "allow-list"
    assert (done["body"]["status"], done["body"]["content"]) == ("ok", "1")
    assert all(entry["identity"]["trace"] == "1" * 32 and entry["call"] == "1" for entry in house.entries())
    (span,) = house.events.events
    assert isinstance(span, SpanEnded)
    assert (span.trace, span.parent, span.name) == ("1" * 32, "2" * 16, "tool.sql")


async def test_the_agent_s_handle_acts_only_through_the_door(house: House) -> None:
    handle = SandboxHandle(house.sandbox)
    for call in (
        handle.sql("INSERT INTO log VALUES (1)", timeout=1),
        handle.run_code("1", timeout=1),
        handle.exec(["ls"], timeout=1),
        handle.snapshot(),
        handle.restore(await house.sandbox.snapshot()),
        handle.fork(2, live=True),
        handle.pause(),
        handle.resume(),
        handle.set_timeout(1.0),
        handle.kill(),
    ):
        with pytest.raises(DoorError):
            await call
    with pytest.raises(DoorError):
        _ = handle.files
    assert (handle.id, handle.info(), handle.limits) == (
        house.sandbox.id,
        house.sandbox.info(),
        house.sandbox.limits,
    )
    assert (await house("sql", {"query": "INSERT INTO log VALUES (1)"})).status is CallStatus.OK
    assert await rows(house.sandbox) == 1


def test_specs_are_given_out_in_order_and_tools_are_not(tmp_path: Path) -> None:
    registry = ToolRegistry.installed()
    assert [spec.name for spec in registry.specs(("sql", "python"))] == ["sql", "python"]
    with pytest.raises(PluginError, match="did you mean 'sql'"):
        registry.specs(("sqk",))
    registry.claim_mint()
    with pytest.raises(DoorError, match="second"):
        registry.claim_mint()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (ToolSpec(name="sql", description="", parameters={"type": "object"}), "registered already"),
        (ToolSpec(name="Bad Name", description="", parameters={"type": "object"}), "tool name"),
        (ToolSpec(name="bad", description="", parameters={"type": "array"}), "object"),
        (ToolSpec(name="bad", description="", parameters={"type": "nothing"}), "no JSON schema"),
        (None, "expected an attribute"),
    ],
)
def test_what_is_no_tool_is_refused(spec: ToolSpec | None, says: str) -> None:
    tool = Odd()
    tool.spec = spec  # type: ignore[assignment]
    with pytest.raises(PluginError, match=says):
        ToolRegistry.installed().register(tool)
