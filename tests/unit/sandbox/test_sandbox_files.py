"""Paths that agents make up, links and pipes in the way, and trees too deep to walk."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.sandbox.archive import Bounds, Member, pack, unpack
from rollwright.sandbox.files import (
    list_beneath,
    pack_beneath,
    read_beneath,
    remove_beneath,
    remove_tree,
    unpack_beneath,
    write_beneath,
)

ROOM = Bounds(total_bytes=10**7, members=5000, file_bytes=10**6)

PARTS = st.sampled_from(["..", ".", "", "a", "b", "out", "file", "etc", "\0", "x" * 300, "ä", "\ud800"])


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    work = tmp_path / "work"
    (work / "a").mkdir(parents=True)
    (work / "out").symlink_to(tmp_path)
    (work / "file").symlink_to(tmp_path / "secret")
    (work / "a" / "out").symlink_to("../..")
    os.mkfifo(work / "b")
    return work


def path_of(path: str) -> str:
    """Its plain form."""
    return "/".join(name for name in path.split("/") if name not in ("", "."))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(PARTS, max_size=5), absolute=st.booleans())
def test_no_path_leads_outside(work: Path, parts: list[str], absolute: bool) -> None:
    path = "/" * absolute + "/".join([*parts, "secret"])
    before = sorted(work.parent.iterdir())
    archive = pack([("secret", b"x")])
    for act in (
        lambda: write_beneath(work, path, b"x", 10),
        lambda: read_beneath(work, path, 10),
        lambda: remove_beneath(work, path),
        lambda: list_beneath(work, path),
        lambda: unpack_beneath(work, archive, path, ROOM),
        lambda: pack_beneath(work, path, ROOM),
        lambda: remove_beneath(work, path),
    ):
        try:
            got = act()
        except OSError:
            continue
        assert got in (None, b"x", archive, [path_of(path) + "/secret"])
        assert ".." not in parts and not absolute
    assert (work.parent / "secret").read_text() == "secret"
    assert sorted(work.parent.iterdir()) == before


@pytest.mark.parametrize(
    "path", ["b", "a", "file", "out/secret", "a/out/secret", "/etc/passwd", "../secret", "", "."]
)
def test_what_is_no_file_inside_is_refused(work: Path, path: str) -> None:
    with pytest.raises(PermissionError):
        read_beneath(work, path, 100)
    with pytest.raises(PermissionError):
        write_beneath(work, path, b"x", 100)


def test_a_hard_link_is_not_written_through(work: Path) -> None:
    os.link(work.parent / "secret", work / "linked")
    with pytest.raises(PermissionError):
        write_beneath(work, "linked", b"x", 100)
    assert (work.parent / "secret").read_text() == "secret"


def test_sizes_are_bounded_even_for_a_sparse_file(work: Path) -> None:
    with (work / "sparse").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(OSError, match="larger than 100"):
        read_beneath(work, "sparse", 100)
    with pytest.raises(OSError, match="larger than 100"):
        write_beneath(work, "new", b"x" * 101, 100)
    assert not (work / "new").exists()


def test_listing_leaves_links_out(work: Path) -> None:
    write_beneath(work, "a/c/d.txt", b"1", 10)
    write_beneath(work, "z.txt", b"1", 10)
    assert list_beneath(work) == ["a/c/d.txt", "z.txt"]
    assert list_beneath(work, "./a/") == list_beneath(work, "a/c") == ["a/c/d.txt"]
    with pytest.raises(FileNotFoundError):
        list_beneath(work, "nothing")
    for wrong in ("out", "a/out", "z.txt", "b", "..", "/tmp"):
        for look in (list_beneath, lambda root, path: pack_beneath(root, path, ROOM)):
            with pytest.raises(PermissionError):
                look(work, wrong)


def deep(top: Path, depth: int) -> None:
    """Folders deeper than any path, each with a file and an empty folder."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 5, dir_fd=here)
        os.mkdir("e", dir_fd=here)
        os.close(os.open("d" * 5 + "/f", os.O_CREAT, dir_fd=here))
        below = os.open("d" * 5, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def descriptors() -> int:
    """Open ones of this process; 0 where nothing tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


@pytest.mark.parametrize("remove", [lambda top: remove_beneath(top, "d" * 5), remove_tree])
def test_a_tree_deeper_than_any_path_is_listed_and_removed(
    tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    top, held = tmp_path / "top", descriptors()
    top.mkdir()
    deep(top, 1500)
    assert sorted(map(len, list_beneath(top))) == [6 * depth + 1 for depth in range(1, 1501)]
    remove(top)
    assert not top.exists() or os.listdir(top) == ["e"]
    assert descriptors() == held
    remove_tree(top)
    remove_tree(top)
    assert not top.exists()


def test_a_tree_deeper_than_any_path_is_packed_and_unpacked(tmp_path: Path) -> None:
    top, other, held = tmp_path / "top", tmp_path / "other", descriptors()
    top.mkdir()
    other.mkdir()
    deep(top, 700)
    made = pack_beneath(top, "", Bounds(total_bytes=0, members=1400, file_bytes=0))
    unpack_beneath(other, made, "", Bounds(total_bytes=0, members=2100, file_bytes=0))
    assert list_beneath(other) == list_beneath(top)
    assert pack_beneath(other, "", ROOM) == made
    assert read_beneath(other, list_beneath(other)[-1], 1) == b""
    assert descriptors() == held


def test_an_archive_round_trips_and_links_stay_out(work: Path) -> None:
    write_beneath(work, "a/c/d.txt", b"1", 10)
    (work / "a" / "empty").mkdir()
    (work / "a" / "run").write_bytes(b"#!")
    (work / "a" / "run").chmod(0o755)
    made = pack_beneath(work, "a", ROOM)
    expected = [Member("c/d.txt", b"1"), Member("empty", None), Member("run", b"#!", True)]
    assert unpack(made, ROOM) == expected
    unpack_beneath(work, made, "new/place", ROOM)
    assert pack_beneath(work, "new/place", ROOM) == made
    assert os.access(work / "new/place/run", os.X_OK) and not os.access(work / "new/place/c/d.txt", os.X_OK)
    for small in (ROOM._replace(total_bytes=2), ROOM._replace(members=2), ROOM._replace(file_bytes=1)):
        with pytest.raises(OSError):
            pack_beneath(work, "a", small)


@pytest.mark.parametrize("names", [["out/secret"], ["new", "a/out/secret"], ["file"], ["b"], ["a"], ["b/x"]])
def test_an_archive_is_not_unpacked_over_a_link(work: Path, names: list[str]) -> None:
    with pytest.raises(PermissionError):
        unpack_beneath(work, pack([(name, b"x") for name in names]), "", ROOM)
    assert (work.parent / "secret").read_text() == "secret"


def test_a_bad_archive_writes_nothing(work: Path) -> None:
    before = sorted(os.listdir(work))
    made = pack([("new", b"x")])[:-1024] + pack([("new", b"x")])
    for archive in (made, made[:700], b""):
        with pytest.raises(OSError):
            unpack_beneath(work, archive, "", ROOM)
    assert sorted(os.listdir(work)) == before


def test_files_and_folders_are_removed_and_nothing_else(work: Path) -> None:
    write_beneath(work, "a/c/d.txt", b"1", 10)
    write_beneath(work, "a/z", b"1", 10)
    os.mkfifo(work / "a" / "c" / "fifo")
    (work / "a" / "c").chmod(0)
    remove_beneath(work, "a/z")
    for wrong in ("out", "file", "b", "out/secret", "a/out", "..", "", ".", "/", "a/c/d.txt/e"):
        with pytest.raises((PermissionError, FileNotFoundError)):
            remove_beneath(work, wrong)
    remove_beneath(work, "a")
    assert sorted(os.listdir(work)) == ["b", "file", "out"]
    assert (work.parent / "secret").read_text() == "secret"
    with pytest.raises(FileNotFoundError):
        remove_beneath(work, "a")


def test_a_folder_that_is_moved_meanwhile_leads_nowhere_else(work: Path) -> None:
    """Two threads: one moves folders about and puts links in their place, one walks."""
    for at in range(40):
        write_beneath(work, f"t/{at}/x/y/f", b"1", 10)
    stop = threading.Event()

    def stir() -> None:
        while not stop.is_set():
            os.rename(work / "t" / "7" / "x", work / "moved")
            os.symlink(work.parent, work / "t" / "7" / "x")
            os.unlink(work / "t" / "7" / "x")
            os.rename(work / "moved", work / "t" / "7" / "x")

    stirring = threading.Thread(target=stir)
    stirring.start()
    try:
        for _ in range(60):
            with contextlib.suppress(PermissionError):
                listed = list_beneath(work)
                assert len(listed) in (39, 40, 41) and not any("secret" in path for path in listed)
    finally:
        stop.set()
        stirring.join()
    assert (work.parent / "secret").read_text() == "secret"


def test_removal_follows_no_link(work: Path) -> None:
    remove_tree(work)
    assert not work.exists()
    assert (work.parent / "secret").read_text() == "secret"
