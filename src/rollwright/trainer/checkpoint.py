"""Tensors and counters as one blob: safetensors with a digest and a schema version, never pickle.

Role: the stored format of a trainer's state. Neighbours: `torch_trainer` above, the blob store below.
Invariants: the same content gives the same bytes; whatever isn't exactly such a blob is a `SchemaError`;
loading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from rollwright.errors import SchemaError

SCHEMA = 1
"""Version of this format; a newer one is refused."""

_KEY = "rollwright.trainer"  # the only metadata key, because safetensors doesn't keep the order of several


def pack(tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> bytes:
    """Tensors and JSON-able `counters` as bytes."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    body = json.dumps(counters, sort_keys=True)
    note = {"schema": SCHEMA, "digest": _digest(held, body), "counters": body}
    return safetensors.torch.save(held, metadata={_KEY: json.dumps(note, sort_keys=True)})


def unpack(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `pack` was given.

    Raises:
        SchemaError: `data` is damaged, of another kind, or of a newer schema.
    """
    try:
        note = json.loads(_metadata(data)[_KEY])
        if note["schema"] != SCHEMA:
            raise SchemaError(
                f"trainer state of schema {note['schema']}, this version reads {SCHEMA}: update rollwright"
            )
        tensors = safetensors.torch.load(data)
        if _digest(tensors, note["counters"]) != note["digest"]:
            raise SchemaError(
                "trainer state is damaged: its digest doesn't match; take an earlier checkpoint"
            )
        counters = json.loads(note["counters"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"not a trainer state ({len(data)} bytes): {error!r}") from error
    return tensors, counters


def _metadata(data: bytes) -> Any:
    """Metadata of a safetensors file: 8 bytes length, then a JSON header."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]


def _digest(tensors: Mapping[str, Tensor], body: str) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, and over `body`."""
    total = hashlib.sha256(body.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).numpy().view("u1").data)
    return total.hexdigest()
