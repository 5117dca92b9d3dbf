"""Paths that agents make up, links and pipes in the way, and trees too deep to walk."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.sandbox.files import list_beneath, read_beneath, remove_tree, write_beneath

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


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(PARTS, max_size=5), absolute=st.booleans())
def test_no_path_leads_outside(work: Path, parts: list[str], absolute: bool) -> None:
    path = "/" * absolute + "/".join([*parts, "secret"])
    before = sorted(work.parent.iterdir())
    for act in (lambda: write_beneath(work, path, b"x", 10), lambda: read_beneath(work, path, 10)):
        try:
            got = act()
        except OSError:
            continue
        assert got in (None, b"x")
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


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d" * 5, dir_fd=here)
        os.close(os.open("d" * 5 + "/f", os.O_CREAT, dir_fd=here))
        below = os.open("d" * 5, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(top)
    assert not top.exists()
    remove_tree(top)


def test_removal_follows_no_link(work: Path) -> None:
    remove_tree(work)
    assert not work.exists()
    assert (work.parent / "secret").read_text() == "secret"
