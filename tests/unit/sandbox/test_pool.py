"""The warm pool: what is given out is fresh and alive, the cap holds, nothing is lost or left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warm_sandboxes import WarmSandbox, WarmSandboxes

from rollwright.errors import ConfigError, LeaseRevoked, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import Limits, Sandbox, State
from rollwright.sandbox.pool import SandboxPool
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandbox
from rollwright.types import CallStatus, Environment, File

TABLE = Environment(files=(File(path="a", text="x"),), sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)")
OTHER = Limits(processes=3)


async def until(condition: Callable[[], bool]) -> None:
    """A few hundred turns of the loop, at most."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come about")


async def turns() -> None:
    """Whatever can go on without time passing has gone on."""
    for _ in range(60):
        await asyncio.sleep(0)


async def opened(
    room: int = 8, least: int = 2, most: int = 4, **more: object
) -> tuple[SandboxPool, WarmSandboxes]:
    clock = FakeClock(auto=False)
    provider = WarmSandboxes(room, clock, **more)  # type: ignore[arg-type]
    pool = SandboxPool(provider, min_idle=least, max_idle=most, clock=clock)
    await pool.start()
    await turns()
    return pool, provider


def clock_of(provider: WarmSandboxes) -> FakeClock:
    assert isinstance(provider.clock, FakeClock)
    return provider.clock


async def test_a_ready_one_is_given_out_filled_and_replaced() -> None:
    pool, provider = await opened()
    assert pool.stats.idle == 2 and pool.live == 0 and provider.live == 2
    sandbox = await pool.create(TABLE, owner="r1")
    assert sandbox.info().owner == "r1"
    found = await sandbox.sql("SELECT a FROM t", timeout=1)
    assert found.rows is not None and found.rows.rows == ((1,),)
    assert await sandbox.files.read("a") == b"x"
    await turns()
    assert (pool.stats.idle, pool.stats.hits, pool.stats.misses, pool.live) == (2, 1, 0, 1)
    assert provider.owners == ["idle/1", "idle/2", "idle/3"]
    await sandbox.kill()
    assert sandbox.info().state is State.KILLED and pool.live == 0
    with pytest.raises(SandboxLost):
        await pool.connect(sandbox.id)
    await pool.close()
    assert provider.live == 0
    with pytest.raises(SandboxLost, match="not open"):
        await pool.create(owner="r2")


async def test_a_dead_one_is_replaced_and_not_given_out() -> None:
    pool, provider = await opened()
    first, second = provider.open.values()
    first.lost = True
    sandbox = await pool.create(owner="r1")
    assert sandbox.id == second.id and pool.stats.died == 1
    await turns()
    assert first.id not in provider.open and pool.stats.idle == 2
    await pool.close()


async def test_a_hanging_one_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.sandbox.pool._PING_SECONDS", 0.01)
    pool, provider = await opened(least=1, most=1)
    (hung,) = provider.open.values()

    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(hung, "ping", never)
    sandbox = await pool.create(owner="r1")
    assert sandbox.id != hung.id and pool.stats.died == 1
    await pool.close()


async def test_what_no_blank_one_has_goes_to_the_provider() -> None:
    pool, provider = await opened()
    sandbox = await pool.create(TABLE, owner="r1", limits=OTHER)
    assert sandbox.limits == OTHER and provider.owners[-1] == "r1"
    snapshot = await sandbox.snapshot()
    copy = await pool.create(owner="r2", snapshot=snapshot)
    assert await copy.files.read("a") == b"x"
    with pytest.raises(SandboxError, match="no network home"):
        await pool.create(owner="r3", network="home")
    with pytest.raises(SandboxUnavailable, match="net"):
        await pool.create(owner="r4", require=["net"])
    assert (pool.stats.passed, pool.stats.hits, pool.stats.misses, pool.stats.idle) == (4, 0, 0, 2)
    same = await pool.create(owner="r5", limits=Limits())
    assert pool.stats.hits == 1 and pool.live == 3
    for each in (sandbox, copy, same):
        await each.kill()
    await pool.close()


async def test_a_provider_of_others_passes_through() -> None:
    clock = FakeClock(auto=False)
    provider = WarmSandboxes(4, clock)
    provider.kind = MemorySandbox
    pool = SandboxPool(provider, min_idle=1, max_idle=2, clock=clock)
    await pool.start()
    await turns()
    assert pool.stats.idle == provider.live == 0
    await pool.create(TABLE, owner="r1")
    await turns()
    assert (pool.stats.passed, provider.live) == (1, 1)
    await pool.close()


async def test_blank_ones_give_way_to_creates_and_forks() -> None:
    pool, provider = await opened(room=4, least=3, most=3)
    assert pool.stats.idle == 3
    made = [await pool.create(owner=f"r{i}", limits=OTHER) for i in range(3)]
    await turns()
    assert (provider.live, pool.stats.idle) == (4, 1)
    (copy,) = await made[0].fork()
    assert (await pool.connect(copy.id)).id == copy.id
    assert (provider.live, pool.stats.idle, pool.live) == (4, 0, 4)
    await copy.kill()
    await until(lambda: pool.stats.idle == 1)
    for each in made:
        await each.kill()
    await until(lambda: pool.stats.idle == 3)
    assert provider.most <= 4 and provider.wrong == []
    await pool.close()


async def test_room_of_one_whose_time_was_up_is_found() -> None:
    pool, provider = await opened(room=2, least=1, most=1)
    short, _ = await pool.create(owner="r1"), await pool.create(owner="r2")
    await short.set_timeout(5)
    await turns()
    assert pool.stats.idle == 0 and pool.live == 2
    for _ in range(8):
        clock_of(provider).advance(1)
        await turns()
    assert short.info().state is State.KILLED
    assert pool.stats.idle == 1 and pool.live == 1
    await pool.close()


async def test_time_begins_when_it_is_given_out() -> None:
    pool, provider = await opened(least=1, most=1, limits=Limits(wall_seconds=10))
    clock_of(provider).advance(100)
    await turns()
    sandbox = await pool.create(owner="r1")
    await turns()
    assert pool.stats.hits == 1 and pool.stats.died == 0
    clock_of(provider).advance(9)
    await turns()
    assert sandbox.info().state is State.RUNNING
    clock_of(provider).advance(2)
    await turns()
    assert sandbox.info().state is State.KILLED and pool.live == 0
    await pool.close()


async def test_misses_raise_what_is_kept_and_quiet_lowers_it() -> None:
    pool, provider = await opened(least=1, most=3)
    for i in range(4):
        made = [await pool.create(owner=f"r{i}/{k}") for k in range(pool.stats.idle + 1)]
        for each in made:
            await each.kill()
        await turns()
    assert pool.stats.idle == 3
    for _ in range(8):
        clock_of(provider).advance(15)
        await turns()
    assert pool.stats.idle == 1 == provider.live
    await pool.close()


async def test_failures_in_the_background_are_counted_told_and_tried_again() -> None:
    broken = True

    def fault(owner: str) -> None:
        if broken:
            raise SandboxError("the zygote died")

    pool, provider = await opened(fault=fault)
    assert pool.stats.failed >= 1 and pool.stats.failure == "SandboxError: the zygote died"
    with pytest.raises(SandboxError, match="the zygote died") as raised:
        await pool.create(owner="r1")
    assert "in the background failed before" in raised.value.__notes__[0]
    before = len(provider.owners)
    for _ in range(100):
        clock_of(provider).advance(0.2)
        await turns()
    assert before + 4 < len(provider.owners) < before + 40, "ever later"
    broken = False
    clock_of(provider).advance(60)
    await until(lambda: pool.stats.idle == 2)
    await pool.create(owner="r2")
    await pool.close()
    assert provider.live == 0


async def test_a_machine_that_is_called_back_is_given_back() -> None:
    revoked = False

    def fault(owner: str) -> None:
        if revoked:
            raise LeaseRevoked("the pool wants the machine back")

    pool, provider = await opened(fault=fault)
    revoked = True
    await pool.create(owner="r1")
    await turns()
    assert pool.stats.idle == 0 and provider.live == 1
    with pytest.raises(LeaseRevoked):
        await pool.create(owner="r2")
    await pool.close()


async def test_an_environment_that_fails_spends_the_sandbox() -> None:
    pool, provider = await opened()
    with pytest.raises(SandboxError, match="SQL failed"):
        await pool.create(Environment(sql="nonsense"), owner="r1")
    await turns()
    assert pool.stats.idle == provider.live == 2 and pool.live == 0
    await pool.close()


async def test_who_is_cancelled_leaves_nothing() -> None:
    pool, provider = await opened(rng=random.Random(1))
    for wait in range(30):
        task = asyncio.create_task(pool.create(TABLE, owner="r"))
        for _ in range(wait % 9):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).kill()
        await turns()
        assert provider.live == pool.stats.idle, wait
    await pool.close()
    assert provider.live == 0 and provider.wrong == []


def test_sizes_are_checked() -> None:
    provider = WarmSandboxes(1, FakeClock())
    for least, most in ((-1, 1), (2, 1)):
        with pytest.raises(ConfigError, match="expected 0 ≤ min_idle ≤ max_idle"):
            SandboxPool(provider, min_idle=least, max_idle=most)


class Life:
    """A random life of a pool: several at once create, use, fork, kill, give up; blank ones die, the provider
    fails for a while."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock(auto=False)
        self.room = self.rng.randint(1, 6)
        self.failing = False
        self.provider = WarmSandboxes(self.room, self.clock, fault=self.fault, rng=self.rng)
        self.least = self.rng.randint(0, 3)
        self.most = self.least + self.rng.randint(0, 3)
        self.pool = SandboxPool(self.provider, min_idle=self.least, max_idle=self.most, clock=self.clock)
        self.taken = 0
        """Room that the actors hold or wait for; they keep it within the cap."""
        self.seen: set[str] = set()

    def fault(self, owner: str) -> None:
        if self.failing and self.rng.random() < 0.7:
            raise SandboxError("not now")

    async def play(self) -> None:
        await self.pool.start()
        actors = [asyncio.create_task(self.act()) for _ in range(self.rng.randint(1, 5))]
        for _ in range(80):
            await asyncio.sleep(0)
            chance = self.rng.random()
            if chance < 0.05:
                self.failing = not self.failing
            elif chance < 0.15 and self.provider.open:
                sandbox = self.rng.choice(list(self.provider.open.values()))
                if isinstance(sandbox, WarmSandbox) and sandbox.info().owner.startswith("idle/"):
                    sandbox.lost = True
            elif chance < 0.3:
                self.clock.advance(self.rng.choice([0.1, 0.5, 2.0]))
            self.judge()
        for _ in range(3000):
            if all(actor.done() for actor in actors):
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError(
                f"somebody waits for ever: {self.pool.stats}, {self.provider.live} of {self.room}"
            )
        await asyncio.gather(*actors)
        self.failing = False
        if self.rng.random() < 0.5:
            for _ in range(12):
                self.clock.advance(31.0)
                await turns()
            assert self.pool.stats.idle == min(self.least, self.room), "quiet"
            assert self.pool.live == 0
        await self.pool.close()
        await turns()
        assert self.provider.live == 0 and self.provider.wrong == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def judge(self) -> None:
        assert self.provider.live <= self.room and self.pool.stats.idle <= self.most
        assert self.provider.wrong == [], self.provider.wrong

    async def act(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            if self.taken >= self.room:
                await asyncio.sleep(0)
                continue
            self.taken += 1
            mine: list[Sandbox] = []
            try:
                mine = await self.create()
                for sandbox in tuple(mine):
                    await self.use(sandbox)
                    if self.taken < self.room and self.rng.random() < 0.3:
                        self.taken += 1
                        try:
                            copies = await sandbox.fork()
                        except SandboxError:
                            self.taken -= 1
                        else:
                            mine += copies
            finally:
                for sandbox in mine:
                    await sandbox.kill()
                self.taken -= max(1, len(mine))

    async def create(self) -> list[Sandbox]:
        sql = "CREATE TABLE t(a)" if self.rng.random() < 0.8 else "nonsense"
        limits = None if self.rng.random() < 0.8 else OTHER
        work = self.pool.create(Environment(sql=sql), owner="r", limits=limits)
        task = asyncio.create_task(work)
        if self.rng.random() < 0.3:
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            return [await task]
        except (SandboxError, asyncio.CancelledError) as error:
            assert sql == "nonsense" or self.failing or "not now" in str(error) or task.cancelled()
            return []

    async def use(self, sandbox: Sandbox) -> None:
        assert sandbox.id not in self.seen, "given out twice"
        self.seen.add(sandbox.id)
        assert sandbox.info().owner == "r" and sandbox.info().state is State.RUNNING
        used = await sandbox.run_code("'mark' in globals()", timeout=1)
        assert used.status is CallStatus.OK and used.value == "False"
        await sandbox.run_code("mark = 1", timeout=1)


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_random_lives_keep_the_books(seed: int) -> None:
    asyncio.run(Life(seed).play())
