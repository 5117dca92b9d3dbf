"""The fake keeps the protocol, so that what is tested with it holds with a real sandbox."""

import pytest

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Limits, State
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.testing.sandbox_life import CHECKS, Check
from rollwright.types import Environment


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_conforms(check: Check) -> None:
    provider = MemorySandboxes()
    await provider.start()
    await check(provider)
    assert provider.live == 0, "a check left a sandbox open"
    await provider.close()


async def test_a_script_that_fails_leaves_nothing() -> None:
    provider = MemorySandboxes()
    with pytest.raises(SandboxError, match="NONSENSE"):
        await provider.create(Environment(sql="CREATE NONSENSE"), owner="r")
    assert provider.live == 0


async def test_time_is_the_clock_s() -> None:
    clock = FakeClock()
    provider = MemorySandboxes(clock=clock)
    sandbox = await provider.create(owner="r", limits=Limits(wall_seconds=600.0))
    await clock.sleep(599.0)
    assert sandbox.info().state is State.RUNNING
    await clock.sleep(2.0)
    with pytest.raises(SandboxLost):
        await sandbox.files.list()
    assert provider.live == 0


async def test_closing_ends_all_and_an_id_is_given_once() -> None:
    provider = MemorySandboxes()
    made = [await provider.create(owner="r") for _ in range(3)]
    assert made[0].id == "r" and len({each.id for each in made}) == 3
    await provider.close()
    assert [each.info().state for each in made] == [State.KILLED] * 3
