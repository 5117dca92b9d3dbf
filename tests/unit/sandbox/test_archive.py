"""Archives: the same bytes for the same files, and what an attacker would write."""

import errno
import io
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import SandboxError
from rollwright.sandbox.archive import BLOCK, Bounds, Member, digest, load, pack, save, unpack

ROOM = Bounds(total_bytes=10**6, members=1000, file_bytes=10**6)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=80)
PATHS = st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4).map("/".join)


def plain(path: str) -> bool:
    return all(len(name.encode()) <= 255 for name in path.split("/"))


def apart(paths: Collection[str]) -> bool:
    return not any(other.startswith(f"{path}/") for path in paths for other in paths)


def raw(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive as the standard library writes it, which checks nothing."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as made:
        for info, data in members:
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def info(
    name: str, type: bytes = tarfile.REGTYPE, link: str = "", pax: dict[str, str] | None = None
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.pax_headers = type, link, pax or {}
    return made


def header(name: bytes, size: int, type: bytes = b"0") -> bytes:
    """One header with a right checksum."""
    block = bytearray(info("x", type).tobuf(tarfile.USTAR_FORMAT))
    block[:100] = name.ljust(100, b"\0")
    block[124:136] = b"%011o\0" % size
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:512]))
    return bytes(block)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(PATHS.filter(plain), st.binary(max_size=1500), max_size=6).filter(lambda f: apart([*f]))
)
def test_what_is_packed_comes_back_and_order_counts_for_nothing(files: dict[str, bytes]) -> None:
    made = pack(files.items())
    assert made == pack(reversed(files.items()))
    assert {each.path: each.data for each in unpack(made, ROOM)} == files
    with tarfile.open(fileobj=io.BytesIO(made)) as other:
        members = other.getmembers()
        assert [each.name for each in members] == sorted(files)
        assert {each.name: other.extractfile(each).read() for each in members} == files  # type: ignore[union-attr]
        assert all(
            (m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) == (0, 0, 0, "", "", 0o644) for m in members
        )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    whole = bytearray(pack([("a/" + "n" * 120, b"1" * 700), ("b", b"2")], folders=["c"]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for archive in (bytes(whole), bytes(whole[:cut])):
        try:
            found = unpack(archive, ROOM)
        except OSError:
            continue
        assert all(".." not in each.path.split("/") and not each.path.startswith("/") for each in found)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3 * BLOCK))
def test_noise_is_no_archive(noise: bytes) -> None:
    try:
        assert unpack(noise, ROOM) == [] and not noise.strip(b"\0")
    except OSError as error:
        assert error.errno == errno.EINVAL


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_what_other_programs_write_is_read(format: int) -> None:
    long = "folder/" * 20 + "file" if format == tarfile.USTAR_FORMAT else "n" * 200 + "/ä" * 80
    program = info("./run.sh")
    program.mode, program.mtime, program.uname = 0o755, 1.5 if format == tarfile.PAX_FORMAT else 1, "someone"
    found = unpack(
        raw(
            (info("./", tarfile.DIRTYPE), b""),
            (program, b"#!"),
            (info("d/", tarfile.DIRTYPE), b""),
            (info("d/e"), b""),
            (info(long), b"x" * 513),
            format=format,
        ),
        ROOM,
    )
    assert found == [
        Member("run.sh", b"#!", True),
        Member("d", None),
        Member("d/e", b""),
        Member(long, b"x" * 513),
    ]


def test_a_global_comment_is_read_over() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "c"}) as made:
        made.addfile(info("a"))
    assert [each.path for each in unpack(out.getvalue(), ROOM)] == ["a"]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "symbolic link": lambda: raw((info("a", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "link, then through it": lambda: raw((info("a", tarfile.SYMTYPE, ".."), b""), (info("a/secret"), b"x")),
    "hard link": lambda: raw((info("a", tarfile.LNKTYPE, "../secret"), b"")),
    "device": lambda: raw((info("a", tarfile.CHRTYPE), b"")),
    "disk": lambda: raw((info("a", tarfile.BLKTYPE), b"")),
    "FIFO": lambda: raw((info("a", tarfile.FIFOTYPE), b"")),
    "contiguous": lambda: raw((info("a", tarfile.CONTTYPE), b"")),
    "GNU sparse": lambda: raw((info("a", tarfile.GNUTYPE_SPARSE), b""), format=tarfile.GNU_FORMAT),
    "pax sparse": lambda: raw((info("a", pax={"GNU.sparse.major": "1", "GNU.sparse.size": "999999"}), b"")),
    "long link": lambda: header(b"././@LongLink", 0, b"K"),
    "unknown type": lambda: header(b"a", 0, b"Z"),
    "absolute": lambda: raw((info("/etc/passwd"), b"")),
    "up": lambda: raw((info("../secret"), b"")),
    "up within": lambda: raw((info("a/../../secret"), b"")),
    "up, a folder": lambda: raw((info("..", tarfile.DIRTYPE), b"")),
    "pax name leads up": lambda: raw((info("a", pax={"path": "../secret"}), b"")),
    "pax name with a zero byte": lambda: raw((info("a", pax={"path": "a\0b"}), b"")),
    "global name": lambda: tarfile.TarInfo.create_pax_global_header({"path": "b"}) + raw((info("a"), b"")),
    "long name": lambda: raw((info("n" * 256), b"")),
    "long path": lambda: raw((info("a/" * 2**19), b"")),
    "not UTF-8": lambda: header(b"\xff", 0),
    "twice": lambda: pack([("a", b"1")])[:-1024] + pack([("a", b"2")]),
    "twice, spelled otherwise": lambda: pack([("a/b", b"1")])[:-1024] + raw((info("./a//b"), b"")),
    "folder twice": lambda: raw((info("a", tarfile.DIRTYPE), b""), (info("a", tarfile.DIRTYPE), b"")),
    "file, then folder": lambda: raw((info("a"), b""), (info("a/b"), b"")),
    "folder, then file": lambda: raw((info("a/b"), b""), (info("a"), b"")),
    "file without a name": lambda: raw((info("./."), b"")),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_member_is_refused(what: str) -> None:
    bad = HOSTILE[what]()
    for archive in (bad, pack([("good", b"1")])[:-1024] + bad):
        with pytest.raises(PermissionError):
            unpack(archive, ROOM)


@pytest.mark.parametrize(
    "archive",
    [
        b"",
        bytes(100),
        b"\x1f\x8b" + bytes(2 * BLOCK),
        header(b"a", 10**9) + bytes(2 * BLOCK),  # says more than there is
        pack([("a", b"1")])[:-1024],  # no end
        pack([("a", b"1")]) + pack([("b", b"1")]),  # a second one behind the end
        header(b"a", 0).replace(b"a", b"b", 1) + bytes(2 * BLOCK),  # wrong checksum
        header(b"x", 9, b"x") + b"9 path=a\n".ljust(BLOCK, b"\0") + bytes(2 * BLOCK),  # a name for nothing
        header(b"x", 9, b"x") + b"999 path=".ljust(BLOCK, b"\0") + bytes(2 * BLOCK),
        header(b"x", 9, b"x") + b"0 path=a\n".ljust(BLOCK, b"\0") + bytes(2 * BLOCK),
        raw((info("a", pax={"size": "-1"}), b"")),
        raw((info("a", pax={"size": "9" * 30}), b"")),
        raw((info("a", tarfile.DIRTYPE, pax={"size": "1024"}), b"")),
    ],
)
def test_a_damaged_archive_is_refused(archive: bytes) -> None:
    with pytest.raises(OSError) as caught:
        unpack(archive, ROOM)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    "bounds", [ROOM._replace(total_bytes=5), ROOM._replace(members=3), ROOM._replace(file_bytes=2)]
)
def test_a_bomb_is_refused_before_anything_is_given_out(bounds: Bounds) -> None:
    archive = pack([("a", b"123"), ("b/c/d", b"123")])
    assert len(unpack(archive, Bounds(total_bytes=6, members=4, file_bytes=3))) == 2
    with pytest.raises(OSError) as caught:
        unpack(archive, bounds)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize(
    "paths", [["/a"], ["../a"], ["a", "./a"], ["a", "a/b"], [""], ["a/"], ["\ud800"], ["n" * 256]]
)
def test_what_would_be_refused_is_not_written(paths: list[str]) -> None:
    with pytest.raises(PermissionError):
        pack([(path, b"") for path in paths])


def test_folders_and_programs_keep_what_they_are() -> None:
    made = pack([("b/run", b"1")], folders=["b", "a/empty"], executable=["b/run"])
    assert unpack(made, ROOM) == [Member("a/empty", None), Member("b", None), Member("b/run", b"1", True)]


def test_a_saved_archive_is_named_by_its_content(tmp_path: Path) -> None:
    archive = pack([("a", b"1")])
    path = save(archive, tmp_path / "made")
    assert path == tmp_path / "made" / f"sha256-{digest(archive)}.tar" == save(archive, path.parent)
    assert [*path.parent.iterdir()] == [path]
    assert load(path) == archive
    path.write_bytes(archive[:-1])
    with pytest.raises(SandboxError, match="not what its name says"):
        load(path)
    assert load(save(archive, path.parent)) == archive
    for wrong in ("sha256-0.tar", f"sha256-{'0' * 64}.tar", "a.tar"):
        with pytest.raises(SandboxError):
            load(tmp_path / wrong)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    archive = pack([("a", b"1")])
    (tmp_path / f"sha256-{digest(archive)}.tar").mkdir()
    with pytest.raises(OSError):
        save(archive, tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
