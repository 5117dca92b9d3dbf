"""What only the E2B backend does, and what it does when the service fails."""

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollwright.clock import SystemClock
from rollwright.errors import MissingExtra, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import SandboxProvider, State
from rollwright.sandbox.pool import SandboxPool
from rollwright.sandbox.remote import owner, patience
from rollwright.sandbox.remote.config import E2BSandbox
from rollwright.types import CallStatus, Environment

if TYPE_CHECKING:
    from fake_e2b import FakeE2B

pytestmark = pytest.mark.needs("e2b")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from fake_e2b import KEY

    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
    yield KEY


@pytest.fixture
async def fake(key: str, tmp_path: Path) -> AsyncIterator["FakeE2B"]:
    from fake_e2b import FakeE2B

    made = FakeE2B(tmp_path)
    async with made.server.serving():
        yield made


def provider(fake: "FakeE2B", **settings: object) -> SandboxProvider:
    where = {"api_url": fake.server.url, "sandbox_url": fake.server.url, "require": ()}
    return E2BSandbox.model_validate(where | settings).build(Path())


@pytest.fixture
async def started(fake: "FakeE2B") -> AsyncIterator[SandboxProvider]:
    made = provider(fake)
    await made.start()
    yield made
    fake.server.silent, fake.server.faults = False, []
    await made.close()
    assert not fake.machines


async def test_without_a_key_it_says_which(fake: "FakeE2B", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(SandboxUnavailable, match="set E2B_API_KEY"):
        await provider(fake).start()


async def test_a_wrong_key_is_refused_and_not_told(fake: "FakeE2B", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
    with pytest.raises(SandboxUnavailable, match="Set E2B_API_KEY to a key of your team") as raised:
        await provider(fake).start()
    chain: BaseException | None = raised.value
    while chain is not None:
        assert "e2b_wrong" not in str(chain)
        chain = chain.__cause__


async def test_without_the_package_it_names_the_extra(
    fake: "FakeE2B", monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provider(fake)
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(MissingExtra, match=r"rollwright\[e2b\]"):
        await made.start()


async def test_a_template_that_is_not_there(fake: "FakeE2B") -> None:
    with pytest.raises(SandboxUnavailable, match="Check template"):
        await provider(fake, template="nonsense").start()


async def test_what_is_required_and_not_kept_is_refused(fake: "FakeE2B") -> None:
    with pytest.raises(SandboxUnavailable, match=r"does not give net as tried from inside; reached: .*127"):
        await provider(fake, require=("net",)).start()
    assert not fake.machines


async def test_the_internet_is_granted_by_name_only(fake: "FakeE2B", started: SandboxProvider) -> None:
    with pytest.raises(SandboxError, match="not granted"):
        await started.create(owner="r", network="internet")
    granting = provider(fake, internet=True)
    await granting.start()
    without = await granting.create(owner="r")
    with_it = await granting.create(owner="r", network="internet")
    assert (fake.denied[without.id], fake.denied[with_it.id]) == (True, False)
    assert with_it.info().network == "internet"
    await granting.close()


async def test_a_pause_is_the_vendors_where_nothing_runs(fake: "FakeE2B", started: SandboxProvider) -> None:
    sandbox = await started.create(owner="r")
    await sandbox.run_code("x = 1", timeout=20)
    await sandbox.pause()
    assert fake.machines[sandbox.id].paused and sandbox.info().state is State.PAUSED
    reading = asyncio.create_task(sandbox.files.list())
    await asyncio.sleep(0.05)
    assert not reading.done()
    await sandbox.resume()
    assert await reading == [] and not fake.machines[sandbox.id].paused
    code = "import time; open('begun', 'w').close(); time.sleep(0.5); x"
    call = asyncio.create_task(sandbox.run_code(code, timeout=20))
    begun = fake.machines[sandbox.id].folder / ".rollwright" / "work" / "begun"
    while not begun.exists():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.01)
    await sandbox.pause()
    assert not fake.machines[sandbox.id].paused  # it would cut off the call
    await sandbox.resume()
    assert (await call).value == "1"


async def test_a_live_fork_is_the_vendors(fake: "FakeE2B", started: SandboxProvider) -> None:
    sandbox = await started.create(Environment(sql="CREATE TABLE t(a)"), owner="r")
    copies = await sandbox.fork(2, live=True)
    for each in copies:
        told = each.info()
        assert (told.forked, told.parent, told.owner) == ("live", sandbox.id, "r")
        assert await each.files.list() == ["data.db"]
        assert fake.machines[each.id].labels[owner.OWNER] == "r"
    assert started.live == 3


async def test_an_ended_helper_costs_the_variables_only(fake: "FakeE2B", started: SandboxProvider) -> None:
    sandbox = await started.create(Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES (3)"), owner="r")
    await sandbox.run_code("x = 1", timeout=20)
    killed = await sandbox.run_code("import os, signal; os.kill(os.getppid(), 9); 1", timeout=20)
    assert killed.status is CallStatus.LOST
    assert "NameError" in (await sandbox.run_code("x", timeout=20)).stderr
    found = await sandbox.sql("SELECT a FROM t", timeout=20)
    assert found.rows is not None and found.rows.rows == ((3,),)


async def test_a_replaced_helper_is_an_observation(fake: "FakeE2B", started: SandboxProvider) -> None:
    """The agent can put a program of its own in the helper's place."""
    sandbox = await started.create(owner="r")
    flood = "import os\nwhile True: os.write(1, b'x' * 65536)"
    for program in (
        flood,
        "print('{}')",
        'print(\'{"state": "file", "name": "../x", "size": 1}\')',
        "exit(1)",
    ):
        code = f"open('../helper.zip', 'w').write({program!r})"
        assert (await sandbox.run_code(code, timeout=20)).status is CallStatus.OK
        assert (await sandbox.run_code("1", timeout=20)).status is CallStatus.LOST
        assert (await sandbox.run_code("2", timeout=20)).value == "2"


async def test_large_files_and_answers_travel_as_files(fake: "FakeE2B", started: SandboxProvider) -> None:
    sandbox = await started.create(owner="r")
    data = os.urandom(3 * 2**20)
    await sandbox.files.write("deep/large.bin", data)
    assert await sandbox.files.read("deep/large.bin") == data
    text = "y" * 100_000
    assert (await sandbox.run_code(f"len({text!r})", timeout=20)).value == "100000"
    left = [path.name for path in (fake.machines[sandbox.id].folder / ".rollwright").iterdir()]
    assert sorted(left) == ["helper.zip", "log", "socket", "work"]
    with pytest.raises(OSError, match="bytes"):
        await sandbox.files.write("larger.bin", bytes(33 * 2**20))


async def test_a_machine_that_the_vendor_ended_is_lost(fake: "FakeE2B", started: SandboxProvider) -> None:
    sandbox = await started.create(owner="r")
    fake.machines.pop(sandbox.id).kill()
    with pytest.raises(SandboxLost):
        await sandbox.run_code("1", timeout=5)
    assert sandbox.info().state is State.KILLED and started.live == 0
    with pytest.raises(SandboxLost):
        await sandbox.files.read("a")


async def test_a_busy_vendor_is_asked_again(fake: "FakeE2B", started: SandboxProvider) -> None:
    fake.server.faults = [429, 503]
    sandbox = await started.create(owner="r")
    assert (await sandbox.run_code("1", timeout=20)).value == "1"


async def test_a_lost_answer_makes_no_second_machine(fake: "FakeE2B", started: SandboxProvider) -> None:
    fake.server.faults = [500]
    await started.create(owner="r")
    made = [r for r in fake.server.requests if (r.method, r.path) == ("POST", "/v2/sandboxes")]
    keys = [r.headers["idempotency-key"] for r in made][-2:]
    assert keys[0] == keys[1] and len(fake.machines) == 1


async def test_a_silent_server_is_not_waited_for(
    fake: "FakeE2B", started: SandboxProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollwright.sandbox.remote import instance, line

    sandbox = await started.create(owner="r")
    for module in (patience, line):
        monkeypatch.setattr(module, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(line, "_POLL_SECONDS", 0.2)
    monkeypatch.setattr(instance, "_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(patience, "_OVER_SECONDS", 0.2)
    fake.server.silent = True
    async with asyncio.timeout(60):
        with pytest.raises(SandboxLost, match="does not answer"):
            await sandbox.run_code("1", timeout=0.2)
    assert sandbox.info().state is State.KILLED
    fake.machines.pop(sandbox.id).kill()  # the vendor's timeout would


async def test_leftovers_of_a_dead_process_are_reaped(fake: "FakeE2B", started: SandboxProvider) -> None:
    """Those of this host's living processes and of other hosts stay."""
    mine = await started.create(owner="r")
    ended = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", "")
    await ended.wait()
    boot, _, started_at = owner.run_label().split("-")
    for name, labels in {
        "dead": {owner.RUN: f"{boot}-{ended.pid}-{started_at}"},
        "reused": {owner.RUN: f"{boot}-{os.getpid()}-1"},
        "rebooted": {owner.RUN: f"{'0' * 12}-{os.getpid()}-{started_at}"},
        "elsewhere": {owner.RUN: f"{boot}-1-1", owner.HOST: "f" * 16},
        "foreign": {owner.RUN: "somebody's"},
    }.items():
        from fake_machine import FakeMachine

        fake.machines[name] = FakeMachine(name, fake._root, owner.labels("r") | labels)
    other = provider(fake)
    await other.start()
    assert set(fake.machines) == {mine.id, "elsewhere", "foreign"}
    await other.close()
    for name in ("elsewhere", "foreign"):
        fake.machines.pop(name).kill()


async def test_a_lifetime_is_the_vendors_to_keep(fake: "FakeE2B", started: SandboxProvider) -> None:
    sandbox = await started.create(owner="r")
    assert fake.machines[sandbox.id].seconds == 900
    await sandbox.set_timeout(100.5)
    assert fake.machines[sandbox.id].seconds == 161  # ours first, the vendor's when we are dead
    await sandbox.set_timeout(None)
    assert fake.machines[sandbox.id].seconds == 900


async def test_a_warm_pool_takes_them(fake: "FakeE2B", started: SandboxProvider) -> None:
    pool = SandboxPool(started, min_idle=1, max_idle=1, clock=SystemClock())
    await pool.start()
    async with asyncio.timeout(20):
        while pool.stats.idle < 1:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    sandbox = await pool.create(Environment(sql="CREATE TABLE t(a)"), owner="r")
    assert pool.stats.hits == 1 and sandbox.info().owner == "r"
    assert await sandbox.files.list() == ["data.db"]
    await pool.close()


def test_the_sdk_is_the_one_that_was_read() -> None:
    """Arguments that the backend passes by name, where the server above would not miss them."""
    from e2b import AsyncSandbox

    create = inspect.signature(AsyncSandbox.create).parameters
    assert {"template", "timeout", "metadata", "allow_internet_access", "idempotency_key"} <= set(create)
    assert {"timeout", "count"} <= set(inspect.signature(AsyncSandbox._cls_fork_sandbox).parameters)
