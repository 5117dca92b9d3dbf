"""The stored form of a trainer's state: exact, repeatable, refused when it isn't whole."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.errors import SchemaError
from rollwright.trainer import checkpoint

TENSORS = {"b/w": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(1.5), "none": torch.zeros(0, 4)}
COUNTERS = {"updates": 3, "rng": {"state": 2**127 + 1}}
BLOB = checkpoint.pack(TENSORS, COUNTERS)


def test_it_round_trips_exactly() -> None:
    tensors, counters = checkpoint.unpack(BLOB)
    assert counters == COUNTERS
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert checkpoint.pack(dict(reversed(tensors.items())), counters) == BLOB


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(BLOB) - 1))
    changed = BLOB[:at] + bytes([BLOB[at] ^ data.draw(st.integers(1, 255))]) + BLOB[at + 1 :]
    with pytest.raises(SchemaError):
        checkpoint.unpack(changed)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SchemaError):
        checkpoint.unpack(data)


@pytest.mark.parametrize("length", [0, 7, 8, 60, len(BLOB) - 1])
def test_a_torn_write_is_refused(length: int) -> None:
    with pytest.raises(SchemaError):
        checkpoint.unpack(BLOB[:length])


def test_foreign_safetensors_are_refused() -> None:
    with pytest.raises(SchemaError, match="not a trainer state"):
        checkpoint.unpack(safetensors.torch.save(TENSORS, metadata={"format": "pt"}))
    with pytest.raises(SchemaError, match="not a trainer state"):
        checkpoint.unpack(safetensors.torch.save(TENSORS))


def test_a_newer_schema_is_named() -> None:
    newer = json.dumps({"schema": 2, "digest": "", "counters": "{}"})
    with pytest.raises(SchemaError, match=r"schema 2.*update rollwright"):
        checkpoint.unpack(safetensors.torch.save(TENSORS, metadata={"rollwright.trainer": newer}))
