"""Tar archives of regular files: written the same every time, read as if an attacker wrote them.

Role: what `upload`, `download` and saved snapshots are made of. Neighbours: `files`, backends. Invariants:
the same files give the same bytes; nothing of an archive is given out before all of it was checked; links,
devices, FIFOs, sparse files, names that lead outside and names that come twice are refused; work and memory
are linear in the archive's length. Format: POSIX.1-2017 pax, "pax Interchange Format" and "ustar Interchange
Format"; GNU's long names are read too. The standard library's reader is not used: before Python 3.11.4 it has
no extraction filter, and it loops on some damaged archives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rollwright.errors import SandboxError

if TYPE_CHECKING:
    from pathlib import Path

# what only the host needs is imported where it is used: each module here makes a sandbox a little slower

BLOCK = 512
NAME_BYTES = 255
"""Longest name of one file or folder."""
PATH_BYTES = 2**19
"""Longest path; deeper trees than the system's own limit fit."""
_END = bytes(BLOCK)
_NAME = re.compile(r"sha256-([0-9a-f]{64})\.tar")
_PLAIN, _FOLDER, _PAX, _PAX_ALL, _LONG = (b"0", b"\0"), b"5", b"x", b"g", b"L"


_Node = TypeVar("_Node")


class Bounds(NamedTuple):
    """What an archive may hold at most."""

    total_bytes: int
    """Of all files."""
    members: int
    """Files and folders, the ones that only stand in a path too."""
    file_bytes: int
    """Of one file."""


class Member(NamedTuple):
    """One file, or where `data` is None a folder."""

    path: str
    data: bytes | None
    executable: bool = False


class _Header(NamedTuple):
    name: bytes
    size: int
    mode: int
    type: bytes


def parts(path: str) -> list[str]:
    """Names on the way of a relative path, without `.`; empty for the folder itself. Raises `PermissionError`
    where it is absolute, holds `..`, a zero byte, a name over 255 bytes or what is not UTF-8."""
    if len(path) > PATH_BYTES or path.startswith("/") or "\0" in path:
        raise _refused("a path that is absolute, too long or no text", path)
    names = [name for name in path.split("/") if name not in ("", ".")]
    try:
        fits = all(len(name.encode()) <= NAME_BYTES for name in names)
    except UnicodeEncodeError as error:
        raise _refused("a name that is not UTF-8", path) from error
    if ".." in names or not fits:
        raise _refused("a name that leads outside or is too long", path)
    return names


def pack(
    files: Iterable[tuple[str, bytes]],
    *,
    folders: Iterable[str] = (),
    executable: Collection[str] = (),
) -> bytes:
    """A tar archive (pax, not compressed) of `files`, (path, contents), and of `folders`. Names are sorted,
    times, owners and groups are zero, modes 0644, or 0755 for folders and the paths in `executable`.

    Raises:
        PermissionError: a path leads outside, is too long, or comes twice.
    """
    programs = set(executable)
    members = [Member(path, data, path in programs) for path, data in files]
    members += [Member(path, None) for path in folders]
    tree = _Tree(Bounds(2**63, 2**63, 2**63))
    out: list[bytes] = []
    for path, member in sorted(((tree.add(each), each) for each in members), key=lambda pair: pair[0]):
        if path:
            out += _blocks(path, member)
    return b"".join([*out, _END, _END])


def _blocks(path: str, member: Member) -> tuple[bytes, ...]:
    import tarfile

    info = tarfile.TarInfo(path)
    info.mode = 0o755 if member.executable or member.data is None else 0o644
    if member.data is None:
        info.type = tarfile.DIRTYPE
        return (info.tobuf(tarfile.PAX_FORMAT),)
    info.size = len(member.data)
    return info.tobuf(tarfile.PAX_FORMAT), member.data, bytes(-info.size % BLOCK)


def unpack(archive: bytes, bounds: Bounds) -> list[Member]:
    """What an untrusted archive holds, in its order; the folder itself (`./`) is left out.

    Raises:
        PermissionError: a member is no regular file or folder, or its name leads outside, is too long or
            comes twice.
        OSError: more than `bounds` allows (EFBIG), or no tar archive, or a damaged one (EINVAL).
    """
    tree, found = _Tree(bounds), []
    for member in _members(archive):
        if path := tree.add(member):
            found.append(member._replace(path=path))
    return found


class _Folder(dict[str, "_Folder | None"]):
    """Names in one folder; None is a file."""

    named = False
    """Whether it was a member itself, not only part of a path."""


class _Tree:
    """Names seen so far, to find those that come twice, files used as folders, and too many."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._top = _Folder()
        self._count = self._bytes = 0

    def add(self, member: Member) -> str:
        """The member's path in its plain form; empty for the folder itself."""
        names = parts(member.path)
        if member.data is None:
            folder = self._enter(names, member.path)
            if folder.named:
                raise _refused("a name that comes twice", member.path)
            folder.named = True
        else:
            self._weigh(member.path, len(member.data))
            if not names or member.path.endswith(("/", "/.")):
                raise _refused("a file named like a folder", member.path)
            folder = self._enter(names[:-1], member.path)
            if names[-1] in folder:
                raise _refused("a name that comes twice", member.path)
            folder[names[-1]] = self._more(None, member.path)
        return "/".join(names)

    def _enter(self, names: list[str], path: str) -> _Folder:
        here = self._top
        for name in names:
            if name not in here:
                here[name] = self._more(_Folder(), path)
            below = here[name]
            if below is None:
                raise _refused("a name that is a file and a folder", path)
            here = below
        return here

    def _more(self, made: _Node, path: str) -> _Node:
        self._count += 1
        if self._count > self._bounds.members:
            raise _large(f"more than {self._bounds.members} files and folders", path)
        return made

    def _weigh(self, path: str, size: int) -> None:
        self._bytes += size
        if size > self._bounds.file_bytes:
            raise _large(f"larger than {self._bounds.file_bytes} bytes", path)
        if self._bytes > self._bounds.total_bytes:
            raise _large(f"more than {self._bounds.total_bytes} bytes in all", path)


def _members(archive: bytes) -> Iterator[Member]:
    at, name, size = 0, None, None  # what an extended header said of the next member
    while (block := archive[at : at + BLOCK]) != _END:
        header = _header(block)
        length = header.size if size is None or header.type in (_PAX, _PAX_ALL, _LONG) else size
        at += BLOCK
        if length > len(archive) - at:
            raise _damaged("it ends within a member")
        data = archive[at : at + length]
        at += length + -length % BLOCK
        if header.type == _PAX:
            if name is not None or size is not None:
                raise _damaged("two extended headers for one member")
            name, size = _extended(data)
        elif header.type == _PAX_ALL:
            if _extended(data) != (None, None):
                raise _refused("a global header that names or sizes files", "")
        elif header.type == _LONG:
            if name is not None:
                raise _damaged("two names for one member")
            name = data.rstrip(b"\0")
        else:
            yield _member(header, header.name if name is None else name, data)
            name = size = None
    if name is not None or size is not None or archive[at:].strip(b"\0"):
        raise _damaged("something follows its end")


def _member(header: _Header, raw: bytes, data: bytes) -> Member:
    try:
        path = raw.decode()
    except UnicodeDecodeError as error:
        raise _refused("a name that is not UTF-8", ascii(raw[:100])) from error
    old_folder = header.type == b"\0" and path.endswith("/")  # before POSIX a folder had no type of its own
    if header.type == _FOLDER or old_folder:
        if data:
            raise _damaged("a folder with contents")
        return Member(path, None)
    if header.type not in _PLAIN:
        raise _refused(f"no regular file or folder (type {header.type!r})", path)
    return Member(path, data, bool(header.mode & 0o100))


def _header(block: bytes) -> _Header:
    if len(block) < BLOCK:
        raise _damaged("it is no tar archive (a compressed one is unpacked first), or its end is missing")
    if _number(block[148:156]) != sum(block[:148]) + 8 * ord(" ") + sum(block[156:]):
        raise _damaged("it is no tar archive (a compressed one is unpacked first), or a header is wrong")
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return _Header(name, _number(block[124:136]), _number(block[100:108]), block[156:157])


def _number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU: the rest is the number in base 256; 0xff would be a negative one
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0")
    if text and not re.fullmatch(rb"[0-7]+", text):
        raise _damaged("a number in a header is none")
    return int(text or b"0", 8)


def _extended(data: bytes) -> tuple[bytes | None, int | None]:
    """Name and size in a pax header; times, owners and comments count for nothing here."""
    name, size, at = None, None, 0
    while at < len(data):
        digits = re.compile(rb"[1-9][0-9]{0,9} ").match(data, at)
        end = at + int(digits.group()) if digits else 0
        if digits is None or end > len(data) or end <= digits.end() or data[end - 1 : end] != b"\n":
            raise _damaged("an extended header is wrong")
        key, equals, value = data[digits.end() : end - 1].partition(b"=")
        at = end
        if key.startswith(b"GNU.sparse") or (key == b"hdrcharset" and value != b"ISO-IR 10646 2000 UTF-8"):
            raise _refused("a sparse file, or names that are not UTF-8", ascii(key))
        if not equals or (key in (b"path", b"size") and not value):
            raise _damaged("an extended header is wrong")
        if key == b"path":
            name = value
        elif key == b"size":
            if not re.fullmatch(rb"[0-9]{1,18}", value):
                raise _damaged("a size is no number")
            size = int(value)
    return name, size


def _refused(what: str, path: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"the archive holds {what}", ascii(path[:300]))


def _large(what: str, path: str) -> OSError:
    return OSError(errno.EFBIG, f"the archive holds {what}", ascii(path[:300]))


def _damaged(what: str) -> OSError:
    return OSError(errno.EINVAL, f"the archive cannot be read: {what}")


def digest(archive: bytes) -> str:
    """SHA-256 in hex."""
    import hashlib

    return hashlib.sha256(archive).hexdigest()


def save(archive: bytes, folder: Path) -> Path:
    """Keep it as `folder`/sha256-….tar, whole or not at all; the same content is the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sha256-{digest(archive)}.tar"
    if path.exists() and path.read_bytes() == archive:
        return path
    import tempfile

    descriptor, made = tempfile.mkstemp(dir=folder, prefix=".saving-")
    try:
        with open(descriptor, "wb") as file:
            file.write(archive)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except BaseException:  # boundary: a part of a file is worse than none; raised on
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        raise
    return path


def load(path: Path) -> bytes:
    """What `save` kept. Raises `SandboxError` where it cannot be read or is not what its name says."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise SandboxError(f"{path}: expected a saved snapshot, a file named sha256-….tar")
    try:
        archive = path.read_bytes()
    except OSError as error:
        raise SandboxError(f"{path}: cannot be read: {error}") from error
    if digest(archive) != named[1]:
        raise SandboxError(f"{path}: its content is not what its name says; take the snapshot again")
    return archive
