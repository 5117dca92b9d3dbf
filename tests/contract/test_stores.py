"""Both stores keep the contract of queue and ledger."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from opened import until_end

from rollwright.buffer.base import Store
from rollwright.buffer.memory import MemoryStore
from rollwright.buffer.sqlite import SqliteStore
from rollwright.testing.clock import FakeClock
from rollwright.testing.stores import CHECKS, Make


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryStore
    numbers = itertools.count()

    def sqlite(capacity: int) -> Store:
        return until_end(SqliteStore(tmp_path / f"{next(numbers)}.db", capacity, FakeClock()))

    return sqlite


@pytest.mark.parametrize("check", CHECKS)
def test_store(check: Callable[[Make], None], make: Make) -> None:
    check(make)
