"""The blob stores keep their contract."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from rollwright.blobs.folder import FolderBlobs
from rollwright.testing.blobs import CHECKS, Make, MemoryBlobs


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return MemoryBlobs
    numbers = itertools.count()
    return lambda: FolderBlobs(tmp_path / str(next(numbers)))


@pytest.mark.parametrize("check", CHECKS)
def test_blobs(check: Callable[[Make], None], make: Make) -> None:
    check(make)
