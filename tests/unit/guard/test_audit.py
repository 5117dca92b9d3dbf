"""The chain: whatever is changed, left out, moved or torn shows at its line."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.blobs.base import Blobs
from rollwright.errors import StoreError
from rollwright.guard.audit import AuditLog, verify
from rollwright.testing.clock import FakeClock
from rollwright.types import Identity

WHO = Identity(run="r", rollout="x")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = AuditLog(tmp_path / "audit.jsonl", FakeClock())
    for number in range(5):
        log.append("asked", WHO, str(number), {"tool": "sql", "text": 'é\n"quoted"'})
    log.close()
    log.close()
    return log.path


def test_a_whole_chain_holds_and_goes_on(path: Path) -> None:
    assert verify(path) is None
    log = AuditLog(path)
    log.append("done", WHO, "5", {"odd": {1, 2}})  # no JSON form: its Python form
    log.close()
    assert verify(path) is None
    entry = msgspec.json.decode(path.read_bytes().splitlines()[2])["entry"]
    assert (entry["number"], entry["identity"]["rollout"], entry["body"]["tool"]) == (3, "x", "sql")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(data=st.data())
def test_any_change_shows_at_its_line(path: Path, data: st.DataObject) -> None:
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[position]))
    changed = path.with_suffix(".changed")
    changed.write_bytes(whole[:position] + bytes([byte]) + whole[position + 1 :])
    found = verify(changed)
    assert found is not None
    assert found <= whole[:position].count(b"\n") + 1


@pytest.mark.parametrize(
    ("change", "line"), [("drop first", 1), ("drop middle", 3), ("swap", 2), ("tear", 5)]
)
def test_missing_and_moved_lines_show(path: Path, change: str, line: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "drop first":
        del lines[0]
    elif change == "drop middle":
        del lines[2]
    elif change == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines[-1] = lines[-1][:-7]
    path.write_bytes(b"".join(lines))
    assert verify(path) == line


def test_a_torn_line_is_cut_off_and_written_down(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"entry":{"sche')
    log = AuditLog(path)
    log.append("asked", WHO, "6", {})
    log.close()
    assert verify(path) is None
    kinds = [msgspec.json.decode(line)["entry"]["kind"] for line in path.read_bytes().splitlines()]
    assert kinds == ["asked"] * 5 + ["torn", "asked"]


def test_a_file_that_is_no_audit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(StoreError, match="no audit entry"):
        AuditLog(tmp_path / "other")


class Kept:
    """Blobs in memory."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def put(self, data: bytes) -> str:
        self.data.append(data)
        return "digest"

    def get(self, digest: str) -> bytes:
        return self.data[0]

    def has(self, digest: str) -> bool:
        return bool(self.data)

    def keep(self, digests: frozenset[str]) -> int:
        return 0


@pytest.mark.parametrize("blobs", [None, Kept()])
def test_large_bodies_are_kept_by_digest(tmp_path: Path, blobs: Blobs | None) -> None:
    log = AuditLog(tmp_path / "audit", FakeClock(), blobs)
    log.append("done", WHO, "1", {"text": "x" * 10_000})
    log.close()
    body = msgspec.json.decode((tmp_path / "audit").read_bytes())["entry"]["body"]
    assert body["stored"] is (blobs is not None)
    assert body["bytes"] > 10_000 and len((tmp_path / "audit").read_bytes()) < 1000
    assert verify(tmp_path / "audit") is None


def test_an_entry_that_cannot_be_written_raises(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit")
    os.close(log._file)
    with pytest.raises(StoreError, match="could not be written"):
        log.append("asked", WHO, "1", {})
