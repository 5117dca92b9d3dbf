"""Files below a sandbox's working folder, touched from the host without being led outside.

Role: read, write, list, remove, pack, unpack. Neighbours: `archive`, backends. Invariants: every step of a
path is opened relative to the one before and never through a link (what `openat2` calls RESOLVE_BENEATH |
RESOLVE_NO_SYMLINKS, without a system call that Python lacks), so a path that the agent changes meanwhile
cannot escape either; only regular files are read or written; no depth of folders stops a walk, which holds
few descriptors and never goes up by `..`: a folder that was moved meanwhile has another one there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rollwright.sandbox.archive import Bounds, pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HELD = 64
"""Folders that a walk holds open at once."""
_LISTED_BYTES = 64 * 2**20
"""Of all paths in one listing: agents can nest long names thousands deep."""


def _names(path: str, *, top: bool = False) -> list[str]:
    parts = path.split("/")
    names = [name for name in parts if name not in ("", ".")]
    fits = path.isascii() or path.encode("utf-8", "replace").decode() == path  # no lone surrogates
    if not (names or top) or path.startswith("/") or ".." in names or "\0" in path or not fits:
        raise PermissionError(errno.EPERM, "expected a relative path below the working folder", path)
    return names


class _Walk(contextlib.AbstractContextManager["_Walk"]):
    """Goes down and up below a folder, however deep. It holds the newest `_HELD` folders of the way open and
    opens the others again, from the top."""

    def __init__(self, root: str | Path) -> None:
        self._names: list[str] = []
        self._open = {0: os.open(root, _FOLDER)}  # depth → descriptor

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def at(self, depth: int) -> int:
        """Go up to `depth`; descriptor of that folder."""
        for deeper in [each for each in self._open if each > depth]:
            os.close(self._open.pop(deeper))
        if depth > len(self._names):  # a folder on the way went away meanwhile
            raise FileNotFoundError(errno.ENOENT, "no such folder any more", "/".join(self._names))
        way, self._names = self._names[:depth], self._names[: max(self._open)]
        for name in way[len(self._names) :]:
            self.down(name)
        return self._open[depth]

    def down(self, name: str, *, make: bool = False) -> int:
        """Go into that folder of the present one; its descriptor."""
        depth = len(self._names)
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._open[depth])
        self._open[depth + 1] = _open(name, _FOLDER, self._open[depth], name)
        self._names.append(name)
        if depth + 1 > _HELD and (oldest := depth + 1 - _HELD) in self._open:
            os.close(self._open.pop(oldest))
        return self._open[depth + 1]

    def enter(self, names: Sequence[str], *, make: bool = False) -> int:
        """Go to the folder of these names from the top; its descriptor."""
        same = 0
        for here, there in zip(self._names, names, strict=False):
            if here != there:
                break
            same += 1
        folder = self.at(same)
        for name in names[same:]:
            folder = self.down(name, make=make)
        return folder


@contextlib.contextmanager
def _parent(root: str | Path, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
    """Descriptor of the folder that holds `path`, and the last name."""
    *folders, name = _names(path)
    with _Walk(root) as walk:
        yield walk.enter(folders, make=make), name


def _open(name: str, flags: int, folder: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (
            errno.ELOOP,
            errno.ENOTDIR,
        ):  # a link gives the first, or with O_DIRECTORY the second
            raise PermissionError(
                errno.EPERM, "a link, or a file, where a folder was expected", path
            ) from error
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise PermissionError(errno.EPERM, "not a regular file", path) from error
        raise


def _open_file(name: str, flags: int, folder: int, path: str) -> int:
    """A regular file; a FIFO is opened without waiting for its other end, then refused."""
    descriptor = _open(name, flags | os.O_NONBLOCK, folder, path)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (flags & os.O_WRONLY and status.st_nlink > 1):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "not a regular file, or a hard link", path)
    return descriptor


def read_beneath(root: str | Path, path: str, limit: int) -> bytes:
    """Contents of the file.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: the path leads outside, over a link, or to no regular file.
        OSError: it has more than `limit` bytes (EFBIG), or cannot be read.
    """
    with _parent(root, path, make=False) as (folder, name):
        return _read(name, folder, path, limit)[0]


def _read(name: str, folder: int, path: str, limit: int) -> tuple[bytes, bool]:
    """Contents, and whether it may be executed."""
    with open(_open_file(name, os.O_RDONLY, folder, path), "rb") as file:
        data = file.read(limit + 1)
        program = bool(os.fstat(file.fileno()).st_mode & 0o100)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    return data, program


def write_beneath(root: str | Path, path: str, data: bytes, limit: int) -> None:
    """Replace the file's contents, making folders. Raises as `read_beneath`."""
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    with _parent(root, path, make=True) as (folder, name):
        _write(name, folder, path, data)


def _write(name: str, folder: int, path: str, data: bytes, program: bool = False) -> None:
    with open(_open_file(name, os.O_WRONLY | os.O_CREAT, folder, path), "wb") as file:
        file.truncate(0)
        file.write(data)
        if program:
            os.fchmod(file.fileno(), 0o700)


class _Found(NamedTuple):
    """What a walk came by."""

    path: str
    """Relative to where the walk began."""
    name: str | None
    """A regular file's; None for a folder that holds neither file nor folder."""
    folder: int
    """Descriptor of the folder that holds it."""


def _found(walk: _Walk, top: Sequence[str]) -> Iterator[_Found]:
    """Regular files and empty folders below the folder `top`. What goes away meanwhile is left out."""
    walk.enter(top)
    todo = [(len(top), "", "")]  # depth of the folder that holds it, its path there, its name
    while todo:
        depth, above, name = todo.pop()
        try:
            folder = walk.at(depth)
            if name:
                folder = walk.down(name)
        except FileNotFoundError:
            continue
        prefix = f"{above}{name}/" if name else ""
        inside = list(os.scandir(folder))
        files = [each.name for each in inside if each.is_file(follow_symlinks=False)]
        below = [each.name for each in inside if each.is_dir(follow_symlinks=False)]
        if prefix and not files and not below:
            yield _Found(prefix, None, folder)
        for file in files:
            yield _Found(prefix + file, file, folder)
        todo += [(depth + bool(name), prefix, each) for each in below]


def list_beneath(root: str | Path, path: str = "") -> list[str]:
    """Paths, relative to `root`, of all regular files in that folder and below, sorted; links are left out.

    Raises:
        FileNotFoundError: there is no such folder.
        PermissionError: the path leads outside, over a link, or to no folder.
        OSError: the paths have more than 64 MiB (EFBIG).
    """
    top, listed, size = _names(path, top=True), [], 0
    prefix = "".join(f"{name}/" for name in top)
    with _Walk(root) as walk:
        for found in _found(walk, top):
            size += len(prefix) + len(found.path)
            if size > _LISTED_BYTES:
                raise OSError(errno.EFBIG, f"paths of more than {_LISTED_BYTES} bytes", path)
            if found.name is not None:
                listed.append(prefix + found.path)
    return sorted(listed)


def pack_beneath(root: str | Path, path: str, limit: Bounds) -> bytes:
    """That folder's regular files and empty folders as a tar archive, see `archive.pack`; their paths begin
    in it. Links are left out. Raises as `list_beneath`, and `OSError` (EFBIG) beyond `limit`."""
    files: list[tuple[str, bytes]] = []
    folders, programs, room, count, listed = [], set(), limit.total_bytes, 0, 0
    with _Walk(root) as walk:
        for found in _found(walk, _names(path, top=True)):
            count, listed = count + 1, listed + len(found.path)
            if count > limit.members or listed > _LISTED_BYTES:
                raise OSError(errno.EFBIG, f"more than {limit.members} files, or too long paths", path)
            if found.name is None:
                folders.append(found.path)
                continue
            try:
                data, program = _read(found.name, found.folder, found.path, min(room, limit.file_bytes))
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno == errno.EFBIG and room < limit.file_bytes:
                    raise OSError(
                        errno.EFBIG, f"files of more than {limit.total_bytes} bytes", path
                    ) from error
                raise
            room -= len(data)
            files.append((found.path, data))
            if program:
                programs.add(found.path)
    return pack(files, folders=folders, executable=programs)


def unpack_beneath(root: str | Path, archive: bytes, path: str, limit: Bounds) -> None:
    """Unpack an untrusted tar archive into that folder, making it; files that are there are replaced.

    Raises:
        PermissionError: the archive holds more than regular files and folders or a name leads outside; then
            nothing was written. Or a link, or a file, is in the way below `root`.
        OSError: more than `limit` (EFBIG), or no tar archive (EINVAL); then nothing was written.
    """
    top = _names(path, top=True)
    members = [(member, member.path.split("/")) for member in unpack(archive, limit)]
    with _Walk(root) as walk:
        walk.enter(top, make=True)
        for member, names in sorted(members, key=lambda each: each[1]):
            if member.data is None:
                walk.enter([*top, *names], make=True)
                continue
            folder = walk.enter([*top, *names[:-1]], make=True)
            _write(names[-1], folder, member.path, member.data, member.executable)


def remove_beneath(root: str | Path, path: str) -> None:
    """Delete a file, or a folder with all that is in it, while the agent's processes may run.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: the path leads outside, over a link, or to no regular file or folder.
    """
    *folders, name = _names(path)
    with _Walk(root) as walk:
        folder = walk.enter(folders)
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            _clear(walk, len(folders), [name])
        elif stat.S_ISREG(mode):
            os.unlink(name, dir_fd=folder)
        else:
            raise PermissionError(errno.EPERM, "not a regular file or folder", path)


def remove_tree(path: str | Path) -> None:
    """Delete a folder whose processes are gone; idempotent."""
    try:
        empty_tree(path)
    except FileNotFoundError:
        return
    os.rmdir(path)


def empty_tree(path: str | Path) -> None:
    """Delete all that is in a folder whose processes are gone; no depth of folders stops it."""
    os.chmod(path, 0o700)
    with _Walk(path) as walk:
        _clear(walk, 0, _empty(walk.at(0)))


def _clear(walk: _Walk, depth: int, names: Sequence[str]) -> None:
    """Delete these folders of the one at `depth`, with all that is in them."""
    todo = [(depth, name, False) for name in names]
    while todo:
        above, name, emptied = todo.pop()
        folder = walk.at(above)
        if emptied:
            os.rmdir(name, dir_fd=folder)
            continue
        try:
            inside = walk.down(name)
        except PermissionError:
            _unlock(name, folder)
            inside = walk.down(name)
        os.fchmod(inside, 0o700)
        todo.append((above, name, True))
        todo += [(above + 1, each, False) for each in _empty(inside)]


def _unlock(name: str, folder: int) -> None:
    """Make a folder readable that its owner made unreadable, and nothing where a link came in its place."""
    if not hasattr(os, "O_PATH"):  # not Linux
        os.chmod(name, 0o700, dir_fd=folder, follow_symlinks=False)
        return
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)  # fchmod refuses a descriptor of this kind
    finally:
        os.close(descriptor)


def _empty(folder: int) -> list[str]:
    """Delete what is not a folder, and folders that are empty; the names of the others."""
    left = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                left.append(name)
    return left
