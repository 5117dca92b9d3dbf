"""Life and death of sandboxes, workers and the zygote; refusals; the reaper."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from local_sandboxes import WALLED, below, built, first, until, until_busy, worker, zygote

from rollwright.errors import DeadlineExceeded, LeaseRevoked, SandboxLost, SandboxUnavailable
from rollwright.pool.base import WorkKind
from rollwright.sandbox import config as configuration
from rollwright.sandbox import local, owners, processes
from rollwright.sandbox import provider as providers
from rollwright.sandbox.auto import AutoProvider
from rollwright.sandbox.base import Limits
from rollwright.sandbox.folder import FolderPlace
from rollwright.sandbox.instance import LocalSandbox
from rollwright.sandbox.local import LandlockProvider, ProcessProvider
from rollwright.sandbox.native import provider as native
from rollwright.sandbox.native.provider import NativeProvider
from rollwright.sandbox.place import Kind
from rollwright.sandbox.provider import LocalProvider
from rollwright.sandbox.registry import Recorded, Registry
from rollwright.types import CallStatus, Environment, ExecResult

TABLE = Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)")
ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM r) SELECT count(*) FROM r"


@pytest.fixture(params=WALLED)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def provider(backend: str, tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = built(backend, tmp_path / "sandboxes")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def landlock(tmp_path: Path) -> AsyncIterator[LandlockProvider]:
    made = LandlockProvider(tmp_path / "sandboxes")
    await made.start()
    yield made
    await made.close()


async def made(provider: LocalProvider, environment: Environment = TABLE) -> LocalSandbox:
    sandbox = await provider.create(environment, owner="r1")
    assert isinstance(sandbox, LocalSandbox)
    return sandbox


async def killed_database(provider: LocalProvider, sandbox: LocalSandbox) -> ExecResult:
    """What a statement gives whose process is killed."""
    database = await worker(provider, sandbox, Kind.DATABASE)
    call = asyncio.create_task(sandbox.sql(ENDLESS, timeout=60))
    await until_busy(database)
    os.kill(database, signal.SIGKILL)
    return await call


async def test_a_killed_database_process_loses_the_sandbox(landlock: LandlockProvider) -> None:
    sandbox = await made(landlock)
    with pytest.raises(SandboxLost, match="database process"):
        await killed_database(landlock, sandbox)
    with pytest.raises(SandboxLost):
        await sandbox.run_code("1", timeout=5)
    await sandbox.kill()


@pytest.mark.needs("namespaces")
async def test_where_agents_reach_the_database_process_its_death_costs_the_call(tmp_path: Path) -> None:
    provider = built("native", tmp_path / "sandboxes")
    await provider.start()
    sandbox = await made(provider)
    assert (await killed_database(provider, sandbox)).status is CallStatus.LOST
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await provider.close()


async def test_a_killed_interpreter_costs_its_variables_only(provider: LocalProvider) -> None:
    sandbox = await made(provider)
    assert (await sandbox.run_code("x = 1", timeout=5)).status is CallStatus.OK
    interpreter = await worker(provider, sandbox, Kind.INTERPRETER)
    call = asyncio.create_task(sandbox.run_code("while True: pass", timeout=60))
    await until_busy(interpreter)
    os.kill(interpreter, signal.SIGKILL)
    assert (await call).status is CallStatus.LOST
    assert "NameError" in (await sandbox.run_code("x", timeout=5)).stderr
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await sandbox.kill()


async def test_a_killed_zygote_loses_its_sandboxes_and_is_replaced(provider: LocalProvider) -> None:
    busy, idle = await made(provider), await made(provider)
    assert (await busy.run_code("1", timeout=10)).status is CallStatus.OK
    interpreter = await worker(provider, busy, Kind.INTERPRETER)
    pids = below(zygote(provider))
    databases = {await worker(provider, each, Kind.DATABASE) for each in (busy, idle)}
    assert {interpreter} | databases <= set(pids)
    call = asyncio.create_task(busy.run_code("while True: pass", timeout=60))
    await until_busy(interpreter)
    os.kill(zygote(provider), signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await call
    with pytest.raises(SandboxLost):
        await idle.sql("SELECT 1", timeout=5)
    fresh = await made(provider)
    assert (await fresh.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    for sandbox in (busy, idle, fresh):
        await sandbox.kill()
    await until(lambda: not any(map(processes.alive, pids)))
    assert provider.live == 0


@pytest.mark.needs("namespaces")
async def test_a_killed_pid_1_loses_its_sandbox_only(tmp_path: Path) -> None:
    provider = built("native", tmp_path / "sandboxes")
    await provider.start()
    lost, other = await made(provider), await made(provider)
    pid = first(provider, lost)
    pids = [pid, *below(pid)]
    assert len(pids) > 1
    call = asyncio.create_task(lost.sql(ENDLESS, timeout=60))
    await until_busy(await worker(provider, lost, Kind.DATABASE))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await call
    assert (await other.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await until(lambda: not any(map(processes.alive, pids)))
    await lost.kill()
    assert provider.live == 1
    await provider.close()


async def test_a_forked_child_that_runs_on_does_not_answer(provider: LocalProvider) -> None:
    sandbox = await made(provider)
    forking = "import os\nfor _ in range(3): os.fork()\nos.getpid()"
    answer = await sandbox.run_code(forking, timeout=10)
    assert answer.status is CallStatus.OK
    assert (await sandbox.run_code("os.getpid()", timeout=10)).value == answer.value
    await sandbox.kill()


async def test_a_clean_database_process_serves_the_next_sandbox_afresh(landlock: LandlockProvider) -> None:
    first = await made(landlock)
    pid = await worker(landlock, first, Kind.DATABASE)
    await first.sql("CREATE TEMP TABLE kept(a)", timeout=5)
    await first.sql("BEGIN", timeout=5)
    await first.kill()
    second = await made(landlock)
    assert await worker(landlock, second, Kind.DATABASE) == pid
    assert second.id != first.id
    for statement in ("SELECT * FROM kept", "COMMIT"):
        assert (await second.sql(statement, timeout=5)).status is CallStatus.ERROR
    assert (await second.sql(ENDLESS, timeout=0.1)).status is CallStatus.TIMEOUT
    await second.kill()
    third = await made(landlock)
    assert await worker(landlock, third, Kind.DATABASE) != pid
    await third.kill()


async def test_many_sandboxes_leave_no_process_and_no_descriptor(provider: LocalProvider) -> None:
    async def once() -> None:
        sandbox = await made(provider)
        await sandbox.run_code("1", timeout=10)
        await sandbox.kill()

    await once()
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(once() for _ in range(8)))
    kept = len(below(zygote(provider)))
    for _ in range(20):
        await once()
    assert provider.live == 0
    # an idle slot keeps a connection and a database, a nest a line, its cgroup's descriptor and itself
    assert len(os.listdir("/proc/self/fd")) <= before + 16
    assert len(below(zygote(provider))) <= kept <= 1 + 8 + 1, "pid 1, nests, the nest of the probe's limits"


async def test_the_number_of_live_sandboxes_is_bounded(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = built(backend, tmp_path / "sandboxes", max_live=2)
    await provider.start()
    first, _ = await made(provider), await made(provider)
    waiting = asyncio.create_task(made(provider))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await first.kill()
    await (await waiting).kill()
    third = await made(provider)
    monkeypatch.setattr(providers, "_CREATE_SECONDS", 0.05)
    with pytest.raises(DeadlineExceeded, match="2 live sandboxes"):
        await made(provider)
    with pytest.raises(DeadlineExceeded, match="2 live sandboxes"):
        await third.fork()
    await third.kill()
    await provider.close()
    assert provider.live == 0
    with pytest.raises(SandboxLost):
        await made(provider)


@pytest.mark.parametrize("pause", [0, 0.001])
async def test_a_cancelled_create_leaves_nothing(provider: LocalProvider, pause: float) -> None:
    await (await made(provider)).kill()
    before = len(below(zygote(provider)))
    for rounds in range(8):
        creating = asyncio.create_task(made(provider))
        for _ in range(rounds):
            await asyncio.sleep(pause)
        creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():  # it was faster
            await creating.result().kill()
    for _ in range(3000):  # what was cancelled is ended behind its back
        if provider.live == 0 and len(below(zygote(provider))) <= before:
            break
        await asyncio.sleep(0.01)
    assert provider.live == 0
    assert len(below(zygote(provider))) <= before
    sandbox = await made(provider)
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await sandbox.kill()


class Revocable:
    """A lease that can be taken back."""

    id, kind, slices, revoked = "lease", WorkKind.SANDBOX, 1, False

    async def wait_revoked(self) -> float:
        raise NotImplementedError

    def check(self) -> None:
        if self.revoked:
            raise LeaseRevoked("taken back")


async def test_no_sandbox_is_made_under_a_revoked_lease(backend: str, tmp_path: Path) -> None:
    lease = Revocable()
    provider = built(backend, tmp_path / "sandboxes", lease=lease)
    await provider.start()
    sandbox = await made(provider)
    lease.revoked = True
    with pytest.raises(LeaseRevoked):
        await made(provider)
    with pytest.raises(LeaseRevoked):
        await sandbox.fork()
    assert (await sandbox.sql("SELECT a FROM t", timeout=5)).status is CallStatus.OK
    await provider.close()


async def test_a_requirement_that_is_not_met_refuses(backend: str, tmp_path: Path) -> None:
    provider = built(backend, tmp_path / "sandboxes", require=("fs", "kernel_surface"))
    with pytest.raises(SandboxUnavailable, match=r"kernel_surface is best_effort.*--unsafe-sandbox"):
        await provider.start()
    with pytest.raises(SandboxUnavailable, match=r"without isolation.*--unsafe-sandbox"):
        await ProcessProvider(tmp_path / "process").start()


async def test_a_sandbox_is_refused_what_it_requires_beyond_the_provider(provider: LocalProvider) -> None:
    with pytest.raises(SandboxUnavailable, match="kernel_surface is best_effort"):
        await provider.create(owner="r1", require=("kernel_surface",))
    assert provider.live == 0


async def test_without_landlock_only_unsafe_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxUnavailable, match=r"no Landlock.*--unsafe-sandbox"):
        await configuration.LandlockSandbox().build(tmp_path).start()
    with pytest.raises(SandboxUnavailable):
        await configuration.ProcessSandbox().build(tmp_path).start()


async def test_auto_takes_the_first_that_starts_and_says_why_not_the_others(tmp_path: Path) -> None:
    def candidates() -> list[tuple[str, LocalProvider]]:
        impossible = LandlockProvider(tmp_path / "strict", require=("kernel_surface",))
        return [("strict", impossible), ("process", ProcessProvider(tmp_path / "process", unsafe=True))]

    provider = AutoProvider(candidates())
    with pytest.raises(SandboxUnavailable, match="start comes first"):
        await provider.create(owner="r1")
    await provider.start()
    sandbox = await provider.create(TABLE, owner="r1")
    assert sandbox.info().backend == "process" and provider.live == 1
    assert (await provider.connect(sandbox.id)) is sandbox
    await provider.close()
    assert provider.live == 0
    with pytest.raises(SandboxUnavailable, match=r"strict: .*kernel_surface is best_effort"):
        await AutoProvider(candidates()[:1]).start()


def test_auto_runs_bare_processes_only_where_that_is_said() -> None:
    names = [each.type for each in configuration.AutoSandbox().candidates()]
    assert "process" not in names and names[0] == "native"
    assert [each.type for each in configuration.AutoSandbox(unsafe=True).candidates()] == [*names, "process"]


def test_limits_reach_the_sandbox() -> None:
    limits = configuration.LandlockSandbox(memory_mib=100, output_kib=2, file_mib=3).limits()
    assert limits == Limits(memory_bytes=100 * 2**20, output_bytes=2048, file_bytes=3 * 2**20)


async def test_a_wall_that_cannot_be_put_up_stops_the_worker(landlock: LandlockProvider) -> None:
    sandbox = await made(landlock, Environment())
    assert isinstance(sandbox._place, FolderPlace)
    sandbox._place._slot.work.rmdir()  # Landlock cannot open it: no walls, no worker
    with pytest.raises(SandboxLost, match="ended with 70"):
        await sandbox.run_code("1", timeout=5)
    await sandbox.kill()


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


HOST = """
import asyncio, pathlib, sys
from rollwright.sandbox.{module} import {name}
from rollwright.types import Environment
async def main():
    provider = {name}(pathlib.Path(sys.argv[1]), require=())
    await provider.start()
    sandbox = await provider.create(Environment(sql='CREATE TABLE t(a)'), owner='r')
    await sandbox.run_code('import os, time\\nif os.fork() == 0: time.sleep(600)', timeout=9)
    sys.stdout.write('ready\\n'); sys.stdout.flush()
    await asyncio.sleep(600)
asyncio.run(main())
"""


def recorded(root: Path) -> list[Recorded]:
    with contextlib.suppress(FileNotFoundError):  # it goes with the last record
        return [each for each in Registry().records() if each.provider.root == str(root)]
    return []


@pytest.mark.needs("namespaces")
async def test_a_provider_that_fails_to_open_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no cgroups today")

    monkeypatch.setattr(native, "groups", broken)
    with pytest.raises(OSError, match="no cgroups today"):
        await built("native", tmp_path / "sandboxes").start()
    assert recorded(tmp_path / "sandboxes") == []
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def left_by_a_killed_host(module: str, name: str, root: Path) -> list[int]:
    """The processes a host leaves that is killed by SIGKILL, none of which can clean up for it."""
    command = [sys.executable, "-c", HOST.format(module=module, name=name), str(root)]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert host.stdout is not None and host.stdout.readline() == "ready\n"
    left = below(host.pid)
    for pid in left:
        os.kill(pid, signal.SIGSTOP)
    host.kill()
    host.wait()
    host.stdout.close()
    assert all(map(processes.alive, left))
    return left


async def test_leftovers_of_a_killed_host_are_gone_after_the_next_start(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    left = await left_by_a_killed_host("local", "LandlockProvider", root)
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    pids = [int(line.split()[0]) for line in (folder / "workers").read_text().splitlines()]
    assert len(pids) == 2 and len(left) == 4, "zygote, database, interpreter, its child"
    zygote = min(set(left) - set(pids))
    os.kill(zygote, signal.SIGKILL)  # it is in nobody's record
    provider = LandlockProvider(root)
    await provider.start()
    assert not folder.exists()
    await until(lambda: not any(map(processes.alive, left)))
    await provider.close()


@pytest.mark.needs("namespaces")
async def test_leftovers_of_a_killed_native_host_are_gone_after_the_next_start(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    left = await left_by_a_killed_host("native.provider", "NativeProvider", root)
    (record,) = recorded(root)
    assert [made.owner for made in record.sandboxes] == ["r"]
    assert len(left) >= 6, "zygote, its pid 1, the sandbox's, database, interpreter, its child"
    provider = NativeProvider(root)
    await provider.start()
    await until(lambda: not any(map(processes.alive, left)))
    assert not any(map(Path.exists, record.cgroups)) and not record.path.exists()
    assert {path.name for path in root.iterdir()} <= {"root", "zygote.log"}
    await provider.close()
    assert [path.name for path in root.iterdir()] == ["zygote.log"]
    assert recorded(root) == []
