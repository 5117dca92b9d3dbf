"""Blobs as files of a folder, fanned out by the first byte of their digest.

Role: the blob store of a run folder. Neighbours: weights and checkpoints put and get, the conductor
collects garbage. Invariants: a file carries its SHA-256 as its name and is visible only when whole and
durable (written aside, fsync, rename, fsync of the folder); reading checks the digest; an interrupted write
leaves nothing under a final name.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from rollwright.errors import StoreError

DIGEST = re.compile(r"[0-9a-f]{64}")
DRAFTS = "drafts"


class FolderBlobs:
    """Blobs below `root`, which is made if it is missing. Several processes may put and get at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._drafts = root / DRAFTS
        try:
            self._drafts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the blob folder {root}: {error.strerror}") from error

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        try:
            if not self._intact(path, digest):
                self._write(path, data)
            _sync_folder(path.parent)
        except OSError as error:
            raise StoreError(
                f"cannot store {len(data):,} bytes in {self._root}: {error.strerror}; what was stored "
                "before is intact: free space on its disk, then resume"
            ) from error
        return digest

    def get(self, digest: str) -> bytes:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise StoreError(
                f"blob {digest[:12]}… is not in {self._root}; it was never stored, or collected"
            ) from error
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise StoreError(
                f"{path} is damaged: its SHA-256 is {found[:12]}…; delete it and restore it from a copy, "
                "or resume from another checkpoint"
            )
        return data

    def has(self, digest: str) -> bool:
        return self._path(digest).is_file()

    def keep(self, digests: frozenset[str]) -> int:
        """See `base`. Also removes drafts of processes that are gone.

        Only whoever knows every owner may call it: what another process has just put, and is not named,
        goes too.
        """
        freed = 0
        for path in self._root.glob("??/*"):
            if path.parent.name + path.name not in digests:
                freed += _remove(path)
        for draft in self._drafts.iterdir():
            owner = draft.name.partition("-")[0]
            if owner.isdecimal() and not _alive(int(owner)):  # what is not ours stays
                freed += _remove(draft)
        return freed

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} is no blob digest: expected 64 hex digits")
        return self._root / digest[:2] / digest[2:]

    def _intact(self, path: Path, digest: str) -> bool:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except FileNotFoundError:
            return False

    def _write(self, path: Path, data: bytes) -> None:
        draft = self._drafts / f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with draft.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                _sync_folder(self._root)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> int:
    """Delete a file; returns its bytes (0 where another process was first)."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _alive(pid: int) -> bool:
    """Whether a process of that number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
