"""A second way to act: looked for in the running system and in the source, and not found."""

import ast
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import DoorError, PluginError
from rollwright.events import TraceContext
from rollwright.guard.audit import AuditLog
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.sandbox.base import Sandbox
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.tools.base import Action, Arguments, Tool
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.tools.sealed import Permit, SealedTool, digest
from rollwright.types import (
    CallStatus,
    Environment,
    Identity,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

SRC = Path(__file__).parents[2] / "src" / "rollwright"
EFFECTS: list[str] = []
NOTHING = digest("{}")


class PlugIn:
    """Somebody else's tool, which knows nothing of seals."""

    spec = ToolSpec(name="plugin", description="", parameters={"type": "object"})

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        EFFECTS.append("plugin")
        return ToolResult(call=action.call.id, status=CallStatus.OK, content="done")


class Child(PlugIn):
    """A plug-in that inherits its way to act."""

    spec = ToolSpec(name="child", description="", parameters={"type": "object"})


class Nested(SealedTool):
    """A tool that calls another one past the door."""

    spec = ToolSpec(name="nested", description="", parameters={"type": "object"})
    other: Tool

    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        return await self.other._run(arguments, action)


ARGUMENTS: dict[str, Arguments] = {
    "sql": {"query": "INSERT INTO log VALUES (1)"},
    "python": {"code": "open('made', 'w')"},
    "write_file": {"path": "made", "text": "x"},
    "read_file": {"path": "made"},
    "shell": {"argv": ["touch", "made"]},
    "plugin": {},
    "child": {},
    "nested": {},
}
TASK = Task(id="t", set="s", messages=(), tools=tuple(ARGUMENTS), checks=())


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    EFFECTS.clear()
    provider = MemorySandboxes()
    yield await provider.create(Environment(sql="CREATE TABLE log(x)"), owner="r1")
    await provider.close()


@pytest.fixture
def registry() -> ToolRegistry:
    registry = ToolRegistry.installed()
    plugin, nested = PlugIn(), Nested()
    nested.other = plugin
    for tool in (plugin, Child(), nested):
        registry.register(tool)
    return registry


def action(name: str, sandbox: Sandbox, id: str = "1") -> Action:
    return Action(
        call=ToolCall(id=id, name=name, arguments=ARGUMENTS[name]),
        identity=Identity(run="r", task="t", rollout="r1", trace="1" * 32),
        task=TASK,
        sandbox=sandbox,
        trace=TraceContext("1" * 32, "2" * 16),
        timeout=5.0,
    )


async def untouched(sandbox: Sandbox) -> bool:
    found = await sandbox.sql("SELECT count(*) FROM log", timeout=1)
    files = await sandbox.files.list()
    return found.rows is not None and found.rows.rows == ((0,),) and not files and not EFFECTS


async def test_no_tool_acts_without_the_door(registry: ToolRegistry, sandbox: Sandbox) -> None:
    tools = registry._tools
    assert set(tools) == set(ARGUMENTS), "a tool of the registry is not covered here"
    for name, tool in tools.items():
        asked, run = action(name, sandbox), type(tool)._run
        forged: Any = Permit("1", name, "0" * 64)
        attempts = (
            lambda tool=tool, asked=asked: tool._run(asked.call.arguments, asked),
            lambda run=run, tool=tool, asked=asked: run(tool, asked.call.arguments, asked),
            lambda run=run, tool=tool, asked=asked, p=forged: run(tool, asked.call.arguments, asked, p),
            lambda asked=asked, p=forged: registry.redeem(p, asked.call.arguments, asked),
        )
        for attempt in attempts:
            with pytest.raises(DoorError):
                await attempt()
    assert await untouched(sandbox)


async def test_a_permit_is_good_once_and_for_one_call(registry: ToolRegistry, sandbox: Sandbox) -> None:
    mint = registry.claim_mint()
    asked = action("plugin", sandbox)
    spent = mint.permit("1", "plugin", NOTHING)
    await registry.redeem(spent, {}, asked)
    EFFECTS.clear()
    revoked = mint.permit("1", "plugin", NOTHING)
    mint.revoke(revoked)
    for permit, arguments, of in (
        (spent, {}, asked),
        (revoked, {}, asked),
        (mint.permit("1", "plugin", NOTHING), {"other": 1}, asked),
        (mint.permit("1", "plugin", NOTHING), {}, action("plugin", sandbox, id="2")),
    ):
        with pytest.raises(DoorError):
            await registry.redeem(permit, arguments, of)
    other: Any = type(registry._tools["plugin"])._run
    with pytest.raises(DoorError):
        await other(registry._tools["plugin"], {}, asked, mint.permit("1", "sql", NOTHING))
    assert await untouched(sandbox)


async def test_through_the_door_they_act_and_not_through_each_other(
    registry: ToolRegistry, sandbox: Sandbox, tmp_path: Path
) -> None:
    audit = AuditLog(tmp_path / "audit")
    door = ToolDoor(registry, GuardChain([AllowList()]), audit)
    for name in ("plugin", "child"):
        assert (await door.invoke(action(name, sandbox, id=name))).content == "done"
    assert EFFECTS == ["plugin", "plugin"]
    with pytest.raises(DoorError, match="without a permit"):
        await door.invoke(action("nested", sandbox, id="nested"))
    assert EFFECTS == ["plugin", "plugin"]
    audit.close()


def test_a_tool_that_cannot_be_sealed_is_refused() -> None:
    class Hidden:
        spec = ToolSpec(name="hidden", description="", parameters={"type": "object"})

        def __init__(self) -> None:
            self._run = self.act

        async def act(self, arguments: Arguments, action: Action) -> ToolResult:
            raise NotImplementedError

    with pytest.raises(PluginError, match="_run"):
        ToolRegistry().register(Hidden())


# In the source

ACTS = {
    "exec",
    "run_code",
    "sql",
    "_run",
    "redeem",
    "run_sealed",
    "permit",
    "claim_mint",
    "_sealed",
}
"""What acts on a sandbox, runs a tool, or leads to it."""
ACTS_ON_SANDBOX = {"files", "snapshot", "restore", "fork", "pause", "resume"}
"""Names that act too, where they are a sandbox's."""
MAY = {
    "sandbox": "is the sandbox",
    "tools": "tools act in it; who may call what there is checked below",
    "reward": "the grader looks into it after the last action",
    "rollout": "sets it up",
    "testing": "fakes and conformance suites",
}
WITHIN_TOOLS = {
    "permit": {"tools/door.py"},
    "claim_mint": {"tools/door.py"},
    "redeem": {"tools/door.py"},
    "_sealed": {"tools/door.py", "tools/base.py"},
    "run_sealed": {"tools/registry.py"},
    "_run": {"tools/sealed.py"},
    "sql": {"tools/sql.py"},
    "run_code": {"tools/python.py"},
    "exec": {"tools/shell.py"},
    "files": {"tools/files.py"},
    "snapshot": set(),
    "restore": set(),
    "fork": set(),
    "pause": set(),
    "resume": set(),
}


def ways(source: str) -> Iterator[tuple[str, int]]:
    """Every use of a name in `ACTS`, called or handed on. A record's field (`environment.sql`, or any `sql`
    in a module that never speaks of sandboxes) and a class's own private method (`self._run`) are something
    else."""
    fields = "environment" if "sandbox" in source.lower() else ""
    tree = ast.parse(source)
    data = {  # what makes an environment is text, no call
        id(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Environment"
        for keyword in node.keywords
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=of) if name in ACTS and id(node) not in data:
                whose = ast.unparse(of)
                if not (name == "sql" and whose.endswith(fields)) and (name, whose) != (
                    "_run",
                    "self",
                ):
                    yield name, node.lineno
            case ast.Attribute(attr=name, value=of) if name in ACTS_ON_SANDBOX:
                if ast.unparse(of).endswith("sandbox"):
                    yield name, node.lineno
            case ast.Name(id="run_sealed" | "claim_mint" as name):
                yield name, node.lineno
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(str(name)), *_]) if name in ACTS:
                yield name, node.lineno


def second_ways(path: str, source: str) -> list[str]:
    """Uses in a module at `path` (relative to the package) that the one door does not account for."""
    package = path.partition("/")[0]
    found = []
    for name, line in ways(source):
        if package == "tools":
            fine = path in WITHIN_TOOLS[name]
        else:
            fine = package in MAY and name not in ("_run", "redeem", "permit", "claim_mint", "_sealed")
        if not fine:
            found.append(f"{path}:{line}: {name}")
    return found


def test_nothing_in_the_source_acts_past_the_door() -> None:
    paths = {path.relative_to(SRC).as_posix(): path.read_text() for path in sorted(SRC.rglob("*.py"))}
    assert "tools/door.py" in paths
    found = [each for path, source in paths.items() for each in second_ways(path, source)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("agents/tool.py", "await session.sandbox.run_code('1', timeout=1)"),
        ("agents/tool.py", "act = session.sandbox.sql"),
        ("agents/tool.py", "Environment(sql=await session.sandbox.sql('1', timeout=1))"),
        ("agents/tool.py", "await tool._run(arguments, action)"),
        ("agents/tool.py", "getattr(sandbox, 'exec')(['ls'])"),
        ("agents/tool.py", "real = session.sandbox._sealed"),
        ("run/loop.py", "registry.claim_mint().permit('1', 'sql', {})"),
        ("rollout/factory.py", "await registry.redeem(permit, {}, action)"),
        ("tools/python.py", "await run_sealed(tool, permit, {}, action)"),
        ("tools/observe.py", "await action.sandbox.sql('SELECT 1', timeout=1)"),
        ("trainer/step.py", "sandbox.files.write('a', b'')"),
        ("agents/tool.py", "files = session.sandbox.files"),
        ("agents/tool.py", "await session.sandbox.fork(2)"),
        ("tools/shell.py", "await action.sandbox.files.read('a')"),
    ],
)
def test_a_second_way_is_seen(path: str, source: str) -> None:
    assert second_ways(path, source)
