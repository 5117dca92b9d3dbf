"""Files below a sandbox's working folder, touched from the host without being led outside.

Role: read, write, list, remove. Neighbours: `instance`. Invariants: every step of a path is opened relative
to the one before and never through a link (what `openat2` calls RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS,
without a system call that Python lacks), so a path that the agent changes meanwhile cannot escape either;
only regular files are read or written; no depth of folders stops removal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _names(path: str) -> list[str]:
    parts = path.split("/")
    names = [name for name in parts if name not in ("", ".")]
    fits = path.isascii() or path.encode("utf-8", "replace").decode() == path  # no lone surrogates
    if not names or parts[0] == "" or ".." in names or "\0" in path or not fits:
        raise PermissionError(errno.EPERM, "expected a relative path below the working folder", path)
    return names


@contextlib.contextmanager
def _parent(root: Path, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
    """Descriptor of the folder that holds `path`, and the last name."""
    *folders, name = _names(path)
    here = os.open(root, _FOLDER)
    try:
        for folder in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=here)
            below = _open(folder, _FOLDER, here, path)
            os.close(here)
            here = below
        yield here, name
    finally:
        os.close(here)


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


def read_beneath(root: Path, path: str, limit: int) -> bytes:
    """Contents of the file.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: the path leads outside, over a link, or to no regular file.
        OSError: it has more than `limit` bytes (EFBIG), or cannot be read.
    """
    with (
        _parent(root, path, make=False) as (folder, name),
        open(_open_file(name, os.O_RDONLY, folder, path), "rb") as file,
    ):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    return data


def write_beneath(root: Path, path: str, data: bytes, limit: int) -> None:
    """Replace the file's contents, making folders. Raises as `read_beneath`."""
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    with (
        _parent(root, path, make=True) as (folder, name),
        open(_open_file(name, os.O_WRONLY | os.O_CREAT, folder, path), "wb") as file,
    ):
        file.truncate(0)
        file.write(data)


def list_beneath(root: Path) -> list[str]:
    """Relative paths of all regular files, sorted; links are left out."""
    found, folders = [], [""]
    while folders:
        prefix = folders.pop()
        for entry in os.scandir(root / prefix):
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                found.append(prefix + entry.name)
    return sorted(found)


def remove_tree(path: Path) -> None:
    """Delete a folder whose processes are gone; idempotent."""
    try:
        empty_tree(path)
    except FileNotFoundError:
        return
    os.rmdir(path)


def empty_tree(path: Path) -> None:
    """Delete all that is in a folder whose processes are gone. It goes down and up folder by folder: no
    recursion, no long path, however deep the tree."""
    os.chmod(path, 0o700)
    here = os.open(path, _FOLDER)
    try:
        above: list[tuple[str, list[str]]] = []  # name of a folder gone into, folders still to do beside it
        todo = _empty(here)
        while todo or above:
            if todo:
                name = todo.pop()
                os.chmod(name, 0o700, dir_fd=here)
                there = os.open(name, _FOLDER, dir_fd=here)
                above.append((name, todo))
                todo = _empty(there)
            else:
                there = os.open("..", _FOLDER, dir_fd=here)
                name, todo = above.pop()
                os.rmdir(name, dir_fd=there)
            os.close(here)
            here = there
    finally:
        os.close(here)


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
