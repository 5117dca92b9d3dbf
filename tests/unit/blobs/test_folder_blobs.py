"""Blobs on disk survive what disks and processes do to them."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.blobs.folder import FolderBlobs
from rollwright.errors import StoreError


def stored(root: Path, digest: str) -> Path:
    return root / digest[:2] / digest[2:]


@pytest.mark.parametrize("damage", [b"", b"other bytes", b"some bytes" * 2])
def test_damage_is_seen_and_repaired_by_storing_again(tmp_path: Path, damage: bytes) -> None:
    blobs = FolderBlobs(tmp_path)
    digest = blobs.put(b"some bytes")
    stored(tmp_path, digest).write_bytes(damage)
    with pytest.raises(StoreError, match="damaged"):
        blobs.get(digest)
    assert blobs.put(b"some bytes") == digest and blobs.get(digest) == b"some bytes"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    small = blobs.put(b"small")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StoreError, match="free space") as caught:
            blobs.put(b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [stored(tmp_path, small)]
    assert blobs.get(blobs.put(b"x" * 100_000)) == b"x" * 100_000


def test_collection_sweeps_drafts_of_the_dead_only(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, alive = tmp_path / "drafts" / f"{dead.pid}-ab", tmp_path / "drafts" / f"{os.getppid()}-cd"
    left.write_bytes(b"1234"), alive.write_bytes(b"56")
    assert blobs.keep(frozenset()) == 4
    assert not left.exists() and alive.exists()


def test_a_killed_writer_shows_nothing(tmp_path: Path) -> None:
    """The bytes are written but not renamed when the process dies: the blob is not there."""
    script = (
        "import os, pathlib, sys\n"
        "from rollwright.blobs.folder import FolderBlobs\n"
        "pathlib.Path.replace = lambda *_: os._exit(9)\n"
        "FolderBlobs(pathlib.Path(sys.argv[1])).put(b'half')\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    blobs = FolderBlobs(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] != []
    assert blobs.keep(frozenset()) == 4
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_root_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot make"):
        FolderBlobs(tmp_path / "file")
