"""The weight channels keep their contract."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollwright.blobs.folder import FolderBlobs
from rollwright.testing.channels import CHECKS, Make
from rollwright.weights.file import FileChannel
from rollwright.weights.in_process import InProcessChannel


@pytest.fixture(params=["in_process", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "in_process":
        channel = InProcessChannel()
        return lambda: (channel, channel)
    trainer, engine = (
        FileChannel(FolderBlobs(tmp_path / "blobs"), tmp_path / "weights.json") for _ in range(2)
    )
    return lambda: (trainer, engine)


@pytest.mark.parametrize("check", CHECKS)
def test_channel(check: Callable[[Make], None], make: Make) -> None:
    check(make)
