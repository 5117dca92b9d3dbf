"""How records are written and read: msgpack with a schema version, arrays as raw bytes; never pickle.

Role: the encoder of records. Neighbours: queue, blobs, events and audit store what it gives. Invariants:
`decode(T, encode(x))` equals `x`; every stored record says its schema version; loading executes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from rollwright.errors import SchemaError

SCHEMA = 1
"""Version of every format this package writes. Raise it with a migration below."""

MIGRATIONS: dict[int, Callable[[Any], Any]] = {}
"""From version k to k+1: a function over the decoded plain value."""

_DTYPES = ("<i4", "<f4", "|u1", "<i8", "<f8")

T = TypeVar("T")


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype.str not in _DTYPES or array.ndim != 1:
            raise SchemaError(f"array of {array.dtype.str}, {array.ndim} dimensions cannot be stored")
        return (array.dtype.str, array.tobytes())
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


@cache
def _dtype(kind: Any) -> str | None:
    """The array type of a field annotated `NDArray[…]`; None for other fields."""
    if get_origin(kind) is not np.ndarray:
        return None
    return str(np.dtype(get_args(get_args(kind)[1])[0]).str)


def _dec(kind: type, value: Any) -> Any:
    if expected := _dtype(kind):
        dtype, data = value
        if dtype != expected:
            raise SchemaError(f"array of {dtype!r}, expected {expected!r}")
        return np.frombuffer(data, dtype=dtype)
    raise NotImplementedError(f"{kind} has no wire form")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc)


def encode(record: Any) -> bytes:
    """`record` with its schema version as msgpack bytes."""
    return _encoder.encode((SCHEMA, record))


def decode(kind: type[T], data: bytes) -> T:
    """The record of type `kind` that `encode` wrote.

    Raises:
        SchemaError: damaged data, a newer schema, or one without a migration.
    """
    try:
        version, raw = msgspec.msgpack.decode(data, type=tuple[int, msgspec.Raw])
        if version == SCHEMA:
            return msgspec.msgpack.decode(raw, type=kind, dec_hook=_dec)
        if version > SCHEMA:
            raise SchemaError(f"schema {version} is newer than {SCHEMA}: update rollwright")
        value = msgspec.msgpack.decode(raw)
        for step in range(version, SCHEMA):
            if step not in MIGRATIONS:
                raise SchemaError(f"schema {version} has no migration to {SCHEMA}")
            value = MIGRATIONS[step](value)
        return msgspec.convert(value, type=kind, dec_hook=_dec)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"not a stored {getattr(kind, '__name__', kind)}: {error}") from error
