"""Weights ↔ bytes, as safetensors.

Role: the one form in which a model's weights are stored or sent. Neighbours: the weights channel and the
engine in another process store what it gives. Invariants: the same weights give the same bytes, hence the
same digest; loading executes nothing; the schema version stands in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rollwright.errors import SchemaError
from rollwright.wire import SCHEMA

_KEY = "rollwright"


def encode(state: Mapping[str, torch.Tensor]) -> bytes:
    """Name → tensor as safetensors bytes; tensors that share memory are written out once each."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        held = tensor.detach().cpu().contiguous()
        address = held.untyped_storage().data_ptr()
        tensors[name] = held.clone() if address in seen else held
        seen.add(address)
    return save(tensors, metadata={_KEY: str(SCHEMA)})


def decode(data: bytes) -> dict[str, torch.Tensor]:
    """What `encode` wrote, on the CPU.

    Raises:
        SchemaError: not safetensors, or not of this schema.
    """
    try:
        tensors = load(data)
        size = int.from_bytes(data[:8], "little")
        written = json.loads(data[8 : 8 + size]).get("__metadata__", {}).get(_KEY)
    except (SafetensorError, ValueError) as error:
        raise SchemaError(f"not published weights: {error}") from error
    if written != str(SCHEMA):
        raise SchemaError(f"weights of schema {written}, expected {SCHEMA}: publish them with this version")
    return tensors
