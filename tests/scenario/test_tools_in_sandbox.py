"""The built-in tools through the door in a real sandbox: what a policy will see, and what it cannot do."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollwright.clock import SystemClock
from rollwright.errors import SandboxError
from rollwright.events import TraceContext
from rollwright.guard.audit import AuditLog, verify
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.reward.config import RewardConfig
from rollwright.reward.rules import RuleReward
from rollwright.sandbox.base import Sandbox
from rollwright.sandbox.local import LandlockProvider, ProcessProvider
from rollwright.testing.records import make_rollout
from rollwright.tools.base import Action, SandboxHandle
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.types import CallStatus, Environment, Identity, SqlResult, Task, ToolCall, ToolResult

TASK = Task(
    id="t",
    set="s",
    messages=(),
    tools=("sql", "python", "shell", "read_file", "write_file"),
    checks=(),
    environment=Environment(sql="CREATE TABLE t(a, b); INSERT INTO t VALUES (1, 'x'), (2, NULL)"),
)


class Bench:
    """A door, and a sandbox that agents only hold a handle of."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.sandbox, self.audit = sandbox, AuditLog(folder / "audit")
        self.door = ToolDoor(ToolRegistry.installed(), GuardChain([AllowList()]), self.audit)
        self.calls = 0

    async def __call__(self, tool: str, timeout: float = 20.0, id: str = "", **arguments: Any) -> ToolResult:
        self.calls += 1
        action = Action(
            call=ToolCall(id=id or f"call-{self.calls}", name=tool, arguments=arguments),
            identity=Identity(run="r", task="t", rollout="r1", trace="1" * 32),
            task=TASK,
            sandbox=SandboxHandle(self.sandbox),
            trace=TraceContext("1" * 32, "2" * 16),
            timeout=timeout,
        )
        return await self.door.invoke(action)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    provider = LandlockProvider(tmp_path / "sandboxes")
    await provider.start()
    made = Bench(await provider.create(TASK.environment, owner="r1"), tmp_path)
    yield made
    made.audit.close()
    assert verify(made.audit.path) is None
    await provider.close()


async def test_what_the_policy_sees(bench: Bench) -> None:
    seen = [
        await bench("sql", query="SELECT b FROM t WHERE a=1"),
        await bench("sql", query="SELECT * FROM t ORDER BY a"),
        await bench("sql", query="SELECT * FROM t WHERE a=9"),
        await bench("sql", query="SELECT * FROM nope"),
        await bench("python", code="x = 20"),
        await bench("python", code="x + 22"),
        await bench("python", code="print(x)\n1/0"),
        await bench("write_file", path="notes/a.txt", text="hello\n"),
        await bench("read_file", path="notes/a.txt"),
        await bench("shell", argv=["cat", "notes/a.txt"]),
        await bench("read_file", path="../owners.jsonl"),
        await bench("read_file", path="nothing"),
        await bench("shell", argv=["cat", "/etc/passwd"]),
        await bench("python", code="open('/etc/passwd')"),
    ]
    assert [result.content for result in seen] == [
        "x",
        "1|x\n2|NULL",
        "none",
        "error: no such table: nope",
        "none",
        "42",
        "error: ZeroDivisionError: division by zero",
        "ok",
        "hello",
        "hello",
        "error: expected a relative path below the working folder",
        "error: No such file or directory",
        "error: cat: /etc/passwd: Permission denied",
        "error: PermissionError: [Errno 13] Permission denied: '/etc/passwd'",
    ]


async def test_deadlines_and_floods(bench: Bench) -> None:
    endless = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM r) SELECT "
    for result, status, content in (
        (await bench("python", 0.2, code="while True: pass"), CallStatus.TIMEOUT, "error: timeout"),
        (await bench("sql", 0.2, query=endless + "max(i) FROM r"), CallStatus.TIMEOUT, "error: timeout"),
        (await bench("shell", 0.2, argv=["sleep", "60"]), CallStatus.TIMEOUT, "error: timeout"),
        (await bench("sql", query=endless + "i FROM r"), CallStatus.OUTPUT, "error: too much output"),
        (await bench("shell", argv=["yes"]), CallStatus.OUTPUT, "error: too much output"),
        (await bench("python", code="'x' * 10**10"), CallStatus.MEMORY, "error: out of memory"),
        (await bench("python", code="import os; os._exit(1)"), CallStatus.ERROR, None),
        (await bench("python", code="1"), CallStatus.OK, "1"),
    ):
        assert result.status is status, result
        assert content in (None, result.content)


async def test_an_insert_happens_once(bench: Bench) -> None:
    insert = "INSERT INTO t VALUES (3, 'y')"
    results = await asyncio.gather(*(bench("sql", id="same", query=insert) for _ in range(8)))
    assert sum(not result.repeated for result in results) == 1
    assert (await bench("sql", query="SELECT count(*) FROM t")).content == "3"


async def test_what_an_agent_leaves_cannot_make_the_grader_fail(tmp_path: Path) -> None:
    """Under `sql_result`: odd files are no harm, a damaged database and a schema that attaches are failed
    checks, and nothing is unscorable."""
    check = SqlResult(query="SELECT 1 AS one", columns=("one",), rows=((1,),))
    task = Task(id="t", set="s", messages=(), tools=("python",), checks=(check,))
    provider = ProcessProvider(tmp_path / "agent", unsafe=True)
    graders = ProcessProvider(tmp_path / "grader", unsafe=True)
    await provider.start()
    await graders.start()
    reward = RuleReward(graders, RewardConfig(), SystemClock())
    try:
        for left, values in (
            ("open('x.bin', 'wb').write(bytes([255, 254]))", {1.0}),
            ("open('data.db', 'wb').write(b'no database' * 500)", {0.0}),
            ("open(b'\\xff', 'w').close()", {0.0, 1.0}),  # as the backend can keep such a name or not
        ):
            sandbox = await provider.create(Environment(sql="CREATE TABLE t (a)"), owner="r")
            assert (await sandbox.run_code(left, timeout=5)).status is CallStatus.OK
            score = await reward.score(task, make_rollout(), sandbox)
            assert score.value in values, (left, score)
            await sandbox.kill()
        sandbox = await graders.create(Environment(sql="CREATE TABLE t (a)"), owner="r")
        with pytest.raises(SandboxError):
            await graders.create(Environment(sql="ATTACH 'other.db' AS other"), owner="r2")
        await sandbox.kill()
    finally:
        await provider.close()
        await graders.close()
