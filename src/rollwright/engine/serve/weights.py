"""Weights in a shared folder, named by the SHA-256 of their bytes.

Role: how new weights reach an engine in another process: a digest travels, the bytes lie on a disk that both
see. Neighbours: the client puts, the server gets; the folder may be a run's `blobs/weights`, because layout
and format are those of its weights channel. Invariants: only a digest names a file, so nothing outside the
folder can be named; what is read has that digest; loading executes nothing (safetensors); a file that several
clients of this process put is there until each has released it, and one that was there before stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.errors import MissingExtra, StoreError

_DIGEST = re.compile(r"[0-9a-f]{64}")


class _Holds:
    """Who of this process needs which file, whichever `WeightsFolder` names it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = Counter[Path]()
        self._ours: set[Path] = set()

    def take(self, path: Path) -> None:
        """One more needs it."""
        with self._lock:
            self._count[path] += 1

    def made(self, path: Path) -> None:
        """It was written here, so that it may be removed here."""
        with self._lock:
            self._ours.add(path)

    def release(self, path: Path) -> None:
        """One fewer needs it; what nobody needs is removed, if it was written here."""
        with self._lock:
            self._count[path] -= 1
            if self._count[path] > 0:
                return
            del self._count[path]
            if path in self._ours:
                self._ours.discard(path)
                path.unlink(missing_ok=True)


_HOLDS = _Holds()


class WeightsFolder:
    """Weights below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, state: Mapping[str, Any]) -> str:
        """Store name → tensor and hold it, until `release`; the digest. What is no tensor travels as an empty
        one, which no model takes: the engine refuses it by its name or shape.

        Raises:
            StoreError: the folder cannot be written.
        """
        from rollwright.model.state import encode

        data = encode(_tensors(state))
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        _HOLDS.take(path.absolute())  # before it is looked for: nobody removes it from here on
        try:
            if not (path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest):
                _write(path, data)
                _HOLDS.made(path.absolute())
        except OSError as error:
            self.release(digest)
            raise StoreError(f"cannot write weights into {self._root}: {error.strerror}") from error
        return digest

    def get(self, digest: str) -> Mapping[str, Any]:
        """Name → tensor, on the CPU.

        Raises:
            StoreError: no digest, nothing of that digest here, or damaged.
            SchemaError: not published weights.
        """
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(
                f"no weights {digest[:12]}… in {self._root} ({error.strerror}): client and server must share "
                "that folder"
            ) from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise StoreError(f"{path} is damaged: it has another SHA-256 than its name; publish again")
        from rollwright.model.state import decode

        return decode(data)

    def release(self, digest: str) -> None:
        """Weights that were put are needed no more, here; the last one's word removes them."""
        _HOLDS.release(self._path(digest).absolute())

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} names no weights: expected 64 hex digits")
        return self._root / digest[:2] / digest[2:]


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state`, an empty tensor for what is none."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("weights of an engine in another process", "torch") from error
    return {name: x if isinstance(x, torch.Tensor) else torch.empty(0) for name, x in state.items()}
