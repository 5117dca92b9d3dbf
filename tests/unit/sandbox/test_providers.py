"""Life and death of sandboxes, workers and the zygote; refusals; the reaper."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from rollwright.errors import DeadlineExceeded, LeaseRevoked, SandboxLost, SandboxUnavailable
from rollwright.pool.base import WorkKind
from rollwright.sandbox import config as configuration
from rollwright.sandbox import confine, local, owners
from rollwright.sandbox.base import Limits
from rollwright.sandbox.instance import LocalSandbox
from rollwright.sandbox.local import LandlockProvider, ProcessProvider
from rollwright.testing.sandboxes import running
from rollwright.types import CallStatus, Environment

TABLE = Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)")
ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM r) SELECT count(*) FROM r"


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LandlockProvider]:
    made = LandlockProvider(tmp_path / "sandboxes")
    await made.start()
    yield made
    await made.close()


async def made(provider: LandlockProvider, environment: Environment = TABLE) -> LocalSandbox:
    sandbox = await provider.create(environment, owner="r1")
    assert isinstance(sandbox, LocalSandbox)
    return sandbox


async def until(condition: Callable[[], bool]) -> None:
    """Wait; the test's own deadline ends it."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(0.002)


async def until_busy(sandbox: LocalSandbox, pid: int) -> None:
    """Until the process has used CPU on the call."""

    def ticks() -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])

    before = ticks()
    await until(lambda: ticks() >= before + 2)


async def test_a_killed_database_process_loses_the_sandbox(provider: LandlockProvider) -> None:
    sandbox = await made(provider)
    database = sandbox._slot.database
    assert database is not None
    call = asyncio.create_task(sandbox.sql(ENDLESS, timeout=60))
    await until_busy(sandbox, database.pid)
    os.kill(database.pid, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="database process"):
        await call
    with pytest.raises(SandboxLost):
        await sandbox.run_code("1", timeout=5)
    await sandbox.close()


async def test_a_killed_interpreter_costs_its_variables_only(provider: LandlockProvider) -> None:
    sandbox = await made(provider)
    assert (await sandbox.run_code("x = 1", timeout=5)).status is CallStatus.OK
    interpreter = sandbox._interpreter
    assert interpreter is not None
    call = asyncio.create_task(sandbox.run_code("while True: pass", timeout=60))
    await until_busy(sandbox, interpreter.pid)
    os.kill(interpreter.pid, signal.SIGKILL)
    assert (await call).status is CallStatus.LOST
    assert "NameError" in (await sandbox.run_code("x", timeout=5)).stderr
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK


async def test_a_killed_zygote_loses_its_sandboxes_and_is_replaced(provider: LandlockProvider) -> None:
    busy, idle = await made(provider), await made(provider)
    call = asyncio.create_task(busy.run_code("while True: pass", timeout=60))
    await until(lambda: busy._interpreter is not None)
    assert busy._interpreter is not None
    pids = [busy._interpreter.pid, *(s._slot.database.pid for s in (busy, idle) if s._slot.database)]
    await until_busy(busy, pids[0])
    zygote = provider._zygote
    assert zygote is not None and zygote._process is not None
    zygote._process.kill()
    with pytest.raises(SandboxLost):
        await call
    with pytest.raises(SandboxLost):
        await idle.sql("SELECT 1", timeout=5)
    fresh = await made(provider)
    assert (await fresh.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    for sandbox in (busy, idle, fresh):
        await sandbox.close()
    await until(lambda: not any(map(running, pids)))


async def test_a_forked_child_that_runs_on_does_not_answer(provider: LandlockProvider) -> None:
    sandbox = await made(provider)
    forking = "import os\nfor _ in range(3): os.fork()\nos.getpid()"
    first = await sandbox.run_code(forking, timeout=10)
    assert first.status is CallStatus.OK
    assert (await sandbox.run_code("os.getpid()", timeout=10)).value == first.value
    await sandbox.close()


async def test_a_clean_database_process_serves_the_next_sandbox_afresh(provider: LandlockProvider) -> None:
    first = await made(provider)
    assert first._slot.database is not None
    pid = first._slot.database.pid
    await first.sql("CREATE TEMP TABLE kept(a)", timeout=5)
    await first.sql("BEGIN", timeout=5)
    await first.close()
    second = await made(provider)
    assert second._slot.database is not None and second._slot.database.pid == pid
    assert second.id != first.id
    for statement in ("SELECT * FROM kept", "COMMIT"):
        assert (await second.sql(statement, timeout=5)).status is CallStatus.ERROR
    assert (await second.sql(ENDLESS, timeout=0.1)).status is CallStatus.TIMEOUT
    await second.close()
    third = await made(provider)
    assert third._slot.database is not None and third._slot.database.pid != pid
    await third.close()


async def test_many_sandboxes_leave_no_process_and_no_descriptor(provider: LandlockProvider) -> None:
    async def once() -> None:
        sandbox = await made(provider)
        await sandbox.run_code("1", timeout=10)
        await sandbox.close()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(once() for _ in range(8)))
    for _ in range(20):
        await once()
    assert provider.live == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 8, "one connection for each idle slot"
    zygote = provider._zygote
    assert zygote is not None
    assert len(zygote._pids) <= 8


async def test_the_number_of_live_sandboxes_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = LandlockProvider(tmp_path / "sandboxes", max_live=2)
    await provider.start()
    first, _ = await made(provider), await made(provider)
    waiting = asyncio.create_task(made(provider))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await first.close()
    await (await waiting).close()
    third = await made(provider)
    monkeypatch.setattr(local, "_CREATE_SECONDS", 0.05)
    with pytest.raises(DeadlineExceeded, match="2 live sandboxes"):
        await made(provider)
    await third.close()
    await provider.close()
    assert provider.live == 0
    with pytest.raises(SandboxLost):
        await made(provider)


async def test_a_cancelled_create_leaves_nothing(provider: LandlockProvider) -> None:
    for rounds in range(6):
        creating = asyncio.create_task(made(provider))
        for _ in range(rounds):
            await asyncio.sleep(0)
        creating.cancel()
        await asyncio.wait([creating])
    for _ in range(3000):  # what was cancelled is closed behind its back
        if provider.live == 0:
            break
        await asyncio.sleep(0.01)
    assert provider.live == 0
    sandbox = await made(provider)
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await sandbox.close()


class Revocable:
    """A lease that can be taken back."""

    id, kind, slices, revoked = "lease", WorkKind.SANDBOX, 1, False

    async def wait_revoked(self) -> float:
        raise NotImplementedError

    def check(self) -> None:
        if self.revoked:
            raise LeaseRevoked("taken back")


async def test_no_sandbox_is_made_under_a_revoked_lease(tmp_path: Path) -> None:
    lease = Revocable()
    provider = LandlockProvider(tmp_path / "sandboxes", lease=lease)
    await provider.start()
    sandbox = await made(provider)
    lease.revoked = True
    with pytest.raises(LeaseRevoked):
        await made(provider)
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await provider.close()


async def test_a_requirement_that_is_not_met_refuses(tmp_path: Path) -> None:
    provider = LandlockProvider(tmp_path / "sandboxes", require=("fs", "kernel_surface"))
    with pytest.raises(SandboxUnavailable, match=r"kernel_surface is best_effort.*--unsafe-sandbox"):
        await provider.start()
    with pytest.raises(SandboxUnavailable, match=r"without isolation.*--unsafe-sandbox"):
        await ProcessProvider(tmp_path / "process").start()


async def test_without_landlock_only_unsafe_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(configuration.AutoSandbox().build(tmp_path), LandlockProvider)
    monkeypatch.setattr(confine, "landlock_abi", lambda: 0)
    monkeypatch.setattr(local, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxUnavailable, match=r"no Landlock.*--unsafe-sandbox"):
        configuration.AutoSandbox().build(tmp_path)
    with pytest.raises(SandboxUnavailable, match="no Landlock"):
        await configuration.LandlockSandbox().build(tmp_path).start()
    assert isinstance(configuration.AutoSandbox(unsafe=True).build(tmp_path), ProcessProvider)
    with pytest.raises(SandboxUnavailable):
        await configuration.ProcessSandbox().build(tmp_path).start()


def test_limits_reach_the_sandbox() -> None:
    limits = configuration.LandlockSandbox(memory_mib=100, output_kib=2, file_mib=3).limits()
    assert limits == Limits(memory_bytes=100 * 2**20, output_bytes=2048, file_bytes=3 * 2**20)


async def test_a_wall_that_cannot_be_put_up_stops_the_worker(tmp_path: Path) -> None:
    provider = LandlockProvider(tmp_path / "sandboxes")
    await provider.start()
    sandbox = await made(provider, Environment())
    sandbox._work = sandbox._slot.folder / "nowhere"  # Landlock cannot open it: no walls, no worker
    with pytest.raises(SandboxLost, match="ended with 70"):
        await sandbox.run_code("1", timeout=5)
    await provider.close()


def test_the_reaper_removes_what_a_dead_host_left(tmp_path: Path) -> None:
    dead, alive, foreign = tmp_path / "dead", tmp_path / "alive", tmp_path / "foreign"
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        for folder in (dead, alive, foreign):
            (folder / "work").mkdir(parents=True)
        owners.record(dead, "r1", 0.0)
        owners.record(alive, "r2", 0.0)
        entry = msgspec.json.decode((dead / "owners.jsonl").read_bytes())
        (dead / "owners.jsonl").write_bytes(
            msgspec.json.encode({**entry, "host_started": entry["host_started"] - 1})
        )
        owners.record_worker(dead, stray.pid)
        with (dead / "workers").open("a") as file:
            file.write(f"{other.pid} 1\n")  # that number was another process's when it was written down
        owners.record_worker(alive, other.pid)
        assert owners.reap(tmp_path) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "foreign"]
        assert stray.wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (stray, other):
            process.kill()
            process.wait()


async def test_leftovers_of_a_killed_host_are_gone_after_the_next_start(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from rollwright.sandbox.local import LandlockProvider\n"
        "from rollwright.types import Environment\n"
        "async def main():\n"
        "    provider = LandlockProvider(pathlib.Path(sys.argv[1]), require=())\n"
        "    await provider.start()\n"
        "    sandbox = await provider.create(Environment(sql='CREATE TABLE t(a)'), owner='r')\n"
        "    await sandbox.run_code('import os, time\\nif os.fork() == 0: time.sleep(600)', timeout=9)\n"
        "    sys.stdout.write(f'{provider._zygote._process.pid}\\n'); sys.stdout.flush()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    root = tmp_path / "sandboxes"
    command = [sys.executable, "-c", script, str(root)]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert host.stdout is not None
    zygote = int(host.stdout.readline())
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    pids = [int(line.split()[0]) for line in (folder / "workers").read_text().splitlines()]
    assert len(pids) == 2 and all(map(running, pids))
    os.kill(zygote, signal.SIGSTOP)  # it cannot clean up for the host
    host.kill()
    host.wait()
    host.stdout.close()
    os.kill(zygote, signal.SIGKILL)
    provider = LandlockProvider(root)
    await provider.start()
    assert not folder.exists()
    await until(lambda: not any(map(running, pids)))
    await provider.close()
