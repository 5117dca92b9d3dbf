"""Weights through a folder: bytes as a blob, and a pointer file to the newest.

Role: the channel between processes of one machine, or of one shared file system. Neighbours: one trainer
publishes, any number of engines poll. Invariants: the pointer is replaced atomically, after the blob is
durable; versions only increase; what is fetched has the digest that was published.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollwright.blobs.base import Blobs
from rollwright.errors import SchemaError, StoreError
from rollwright.model import state as codec
from rollwright.types import PolicyVersion, Probe, WeightsRef
from rollwright.wire import SCHEMA


class Pointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pointer file, JSON for people to read. `recent` are the digests kept, newest first."""

    schema: int
    version: PolicyVersion
    digest: str
    recent: tuple[str, ...]
    probe_tokens: list[int] | None = None
    probe_logprobs: list[float] | None = None


class FileChannel:
    """Weights in `blobs`, the newest named by `pointer_path`; the last `keep` versions stay fetchable.

    `blobs` belongs to the channel alone: publishing deletes everything else in it.
    """

    def __init__(self, blobs: Blobs, pointer_path: Path, keep: int = 4) -> None:
        self._blobs = blobs
        self._path = pointer_path
        self._keep = keep
        self._stamp: tuple[int, int, int] | None = None
        self._pointer: Pointer | None = None

    def publish(
        self, version: PolicyVersion, state: Mapping[str, Any], probe: Probe | None = None
    ) -> WeightsRef:
        """See `base`; state is name → tensor of torch.

        Raises:
            StoreError: the version is not newer, or the disk is full (the last version stays the newest).
        """
        last = self._read()
        if last is not None and version <= last.version:
            raise StoreError(f"weights {version} published after {last.version}: versions must increase")
        digest = self._blobs.put(codec.encode(state))
        before = [old for old in (last.recent if last else ()) if old != digest]
        pointer = Pointer(
            schema=SCHEMA,
            version=version,
            digest=digest,
            recent=(digest, *before)[: self._keep],
            probe_tokens=None if probe is None else probe.tokens.tolist(),
            probe_logprobs=None if probe is None else probe.logprobs.tolist(),
        )
        self._replace(msgspec.json.format(msgspec.json.encode(pointer), indent=1))
        self._blobs.keep(frozenset(pointer.recent))
        return WeightsRef(version=version, digest=digest, probe=probe)

    def latest(self) -> WeightsRef | None:
        """See `base`; one `stat` where nothing changed.

        Raises:
            SchemaError: the pointer file is damaged or of another schema.
        """
        pointer = self._read()
        if pointer is None:
            return None
        probe = None
        if pointer.probe_tokens is not None and pointer.probe_logprobs is not None:
            probe = Probe(
                tokens=np.array(pointer.probe_tokens, dtype=np.int32),
                logprobs=np.array(pointer.probe_logprobs, dtype=np.float32),
            )
        return WeightsRef(version=pointer.version, digest=pointer.digest, probe=probe)

    def fetch(self, ref: WeightsRef) -> Mapping[str, Any]:
        return codec.decode(self._blobs.get(ref.digest))

    def _read(self) -> Pointer | None:
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return self._pointer
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            schema = msgspec.json.decode(data, type=_Schema).schema
            if schema != SCHEMA:
                raise SchemaError(f"{self._path} has schema {schema}, expected {SCHEMA}: publish anew")
            pointer = msgspec.json.decode(data, type=Pointer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SchemaError(
                f"{self._path} is damaged ({error}): delete it and resume; "
                "the trainer publishes its weights anew"
            ) from error
        # The stamp was taken before reading: a pointer replaced in between is read again at the next poll.
        self._stamp, self._pointer = stamp, pointer
        return pointer

    def _replace(self, data: bytes) -> None:
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise StoreError(
                f"cannot write {self._path}: {error.strerror}; the last version stays the newest: "
                "free space on its disk, then resume"
            ) from error
        finally:
            draft.unlink(missing_ok=True)


class _Schema(msgspec.Struct):
    schema: int
