"""Both stores keep the contract of queue and ledger."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from rollwright.buffer.base import Store
from rollwright.buffer.memory import MemoryStore
from rollwright.buffer.sqlite import SqliteStore
from rollwright.testing.clock import FakeClock
from rollwright.testing.stores import CHECKS, Make


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    if request.param == "memory":
        yield MemoryStore
        return
    numbers, stack = itertools.count(), ExitStack()

    def sqlite(capacity: int) -> Store:
        return stack.enter_context(
            closing(SqliteStore(tmp_path / f"{next(numbers)}.db", capacity, FakeClock()))
        )

    with stack:
        yield sqlite


@pytest.mark.parametrize("check", CHECKS)
def test_store(check: Callable[[Make], None], make: Make) -> None:
    check(make)
