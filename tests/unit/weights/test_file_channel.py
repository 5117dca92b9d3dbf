"""Weights by file: what readers see while things go wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollwright.blobs.folder import FolderBlobs
from rollwright.errors import SchemaError, StoreError
from rollwright.model import state as codec
from rollwright.testing.blobs import MemoryBlobs
from rollwright.testing.channels import same, state
from rollwright.types import PolicyVersion, WeightsRef
from rollwright.weights.file import FileChannel


def version(step: int) -> PolicyVersion:
    return PolicyVersion(run="run", step=step)


@pytest.fixture
def pointer(tmp_path: Path) -> Path:
    return tmp_path / "weights.json"


def test_the_last_versions_are_kept_and_no_more(pointer: Path) -> None:
    blobs = MemoryBlobs()
    channel = FileChannel(blobs, pointer, keep=3)
    refs = [channel.publish(version(step), state(float(step))) for step in range(6)]
    assert len(blobs.data) == 3
    for step in (3, 4, 5):
        assert same(channel.fetch(refs[step]), state(float(step)))
    for step in (0, 1, 2):
        with pytest.raises(StoreError):
            channel.fetch(refs[step])
    channel.publish(version(6), state(4.0))  # the same bytes as an older version are one blob
    assert len(blobs.data) == 3 and same(channel.fetch(refs[4]), state(4.0))


def test_damaged_weights_are_refused(tmp_path: Path, pointer: Path) -> None:
    channel = FileChannel(FolderBlobs(tmp_path / "blobs"), pointer)
    ref = channel.publish(version(1), state(1.0))
    file = tmp_path / "blobs" / ref.digest[:2] / ref.digest[2:]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        channel.fetch(ref)


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_a_torn_pointer_is_reported(pointer: Path, cut: int) -> None:
    blobs = MemoryBlobs()
    channel = FileChannel(blobs, pointer)
    channel.publish(version(1), state(1.0))
    whole = pointer.read_bytes()
    pointer.write_bytes(whole[:cut])
    for reader in (channel, FileChannel(blobs, pointer)):
        with pytest.raises(SchemaError, match="delete it"):
            reader.latest()
    with pytest.raises(SchemaError):
        channel.publish(version(2), state(2.0))
    pointer.write_bytes(whole)
    found = channel.latest()
    assert found is not None and found.version == version(1)


@pytest.mark.parametrize("change", [{"schema": 99}, {"surprise": 1}, {"digest": 7}])
def test_another_schema_is_refused(pointer: Path, change: dict[str, object]) -> None:
    channel = FileChannel(MemoryBlobs(), pointer)
    channel.publish(version(1), state(1.0))
    pointer.write_text(json.dumps(json.loads(pointer.read_text()) | change))
    with pytest.raises(SchemaError):
        channel.latest()


def test_a_publisher_killed_before_the_pointer_moves(tmp_path: Path, pointer: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    channel = FileChannel(blobs, pointer)
    first = channel.publish(version(1), state(1.0))
    script = (
        "import os, sys, pathlib\n"
        "from rollwright.weights.file import FileChannel\n"
        "from rollwright.blobs.folder import FolderBlobs\n"
        "from rollwright.testing.channels import state\n"
        "from rollwright.types import PolicyVersion\n"
        "FileChannel._replace = lambda *_: os._exit(9)\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "channel = FileChannel(FolderBlobs(folder / 'blobs'), folder / 'weights.json')\n"
        "channel.publish(PolicyVersion(run='run', step=2), state(2.0))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    found = channel.latest()
    assert found is not None and found.version == version(1) and same(channel.fetch(found), state(1.0))
    second = channel.publish(version(2), state(3.0))  # the orphan is collected
    files = list((tmp_path / "blobs").glob("??/*"))
    assert sorted(path.parent.name + path.name for path in files) == sorted({first.digest, second.digest})


def test_the_same_weights_have_the_same_digest() -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(5, 7) for name in ("b", "a", "c")}
    turned = dict(reversed(weights.items()))
    assert codec.encode(weights) == codec.encode(turned)
    assert codec.encode(weights) != codec.encode(weights | {"a": weights["a"] + 1e-7})


def test_what_is_not_contiguous_or_needs_gradient_travels() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    odd = {"turned": base.T, "part": base[1], "live": torch.ones(2, requires_grad=True)}
    assert same(codec.decode(codec.encode(odd)), {name: each.detach() for name, each in odd.items()})


@pytest.mark.parametrize("data", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 64, b"\x80\x04N."])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SchemaError):
        codec.decode(data)


def test_a_probe_that_is_published_is_optional(pointer: Path) -> None:
    channel = FileChannel(MemoryBlobs(), pointer)
    assert isinstance(channel.publish(version(1), state(1.0)), WeightsRef)
    assert json.loads(pointer.read_text())["probe_tokens"] is None
