"""Every record survives the wire exactly; whatever is not a record is a SchemaError and nothing else."""

import enum
import types as builtin_types
import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright import types, wire
from rollwright.buffer.base import Commit, Counts, Drop, Entry, Queued
from rollwright.errors import SchemaError
from rollwright.testing.records import make_group
from rollwright.types import Group, Identity, PolicyVersion, Record, Row

BASES = {types.Record, types.ArrayRecord, types.Check}
RECORDS = [
    kind
    for name in types.__all__
    if isinstance(kind := getattr(types, name), type)
    and issubclass(kind, msgspec.Struct)
    and kind not in BASES
]
STORED = [Commit, Counts, Drop, Entry, Queued]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    Any: JSON,
}


def arrays(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    """Any bytes as an array: every number, NaN and negative zero among them."""
    return st.integers(0, 4).flatmap(
        lambda n: st.binary(min_size=n * dtype.itemsize, max_size=n * dtype.itemsize).map(
            lambda data: np.frombuffer(data, dtype=dtype)
        )
    )


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotated type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is np.ndarray:
        return arrays(np.dtype(typing.get_args(inner[1])[0]))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (typing.Union, builtin_types.UnionType):
        return st.one_of([values(each) for each in inner])
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    assert issubclass(kind, msgspec.Struct), kind
    hints = typing.get_type_hints(kind)
    fields = {name: st.deferred(lambda hint=hints[name]: values(hint)) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def same(a: Any, b: Any) -> bool:
    """Equal in type and content, arrays bit by bit."""
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", [*RECORDS, *STORED], ids=lambda kind: kind.__name__)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    stored = wire.encode(value)
    assert same(wire.decode(kind, stored), value)
    assert wire.encode(wire.decode(kind, stored)) == stored


def test_the_comparison_can_fail() -> None:
    group, other = make_group([1.0]), make_group([1.0])
    assert same(group, other)
    other.members[0].rollout.rows[0].logprobs[3] += 1e-6
    assert not same(group, other)
    assert not same(1, 1.0) and not same([1], (1,))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_unknown_field_is_refused(kind: type, data: st.DataObject) -> None:
    version, body = msgspec.msgpack.decode(wire.encode(data.draw(values(kind))))
    body["surprise"] = 1
    with pytest.raises(SchemaError, match="surprise"):
        wire.decode(kind, msgspec.msgpack.encode((version, body)))


def test_a_newer_and_an_unmigrated_schema_are_refused() -> None:
    identity = Identity(run="r")
    newer = msgspec.msgpack.encode((wire.SCHEMA + 1, identity))
    with pytest.raises(SchemaError, match="update rollwright"):
        wire.decode(Identity, newer)
    for old in (0, -1):
        with pytest.raises(SchemaError, match="no migration"):
            wire.decode(Identity, msgspec.msgpack.encode((old, identity)))


def test_a_migration_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_group([1.0]).members[0].rollout.rows[0]
    version, body = msgspec.msgpack.decode(wire.encode(row))
    body["marks"] = body.pop("provenance")

    def rename(old: Any) -> Any:
        return {("provenance" if name == "marks" else name): value for name, value in old.items()}

    old = msgspec.msgpack.encode((version, body))
    with pytest.raises(SchemaError):
        wire.decode(Row, old)
    monkeypatch.setattr(wire, "SCHEMA", version + 1)
    monkeypatch.setitem(wire.MIGRATIONS, version, rename)
    assert same(wire.decode(Row, old), row)
    assert msgspec.msgpack.decode(wire.encode(row))[0] == version + 1


STORED_GROUP = wire.encode(make_group([1.0, None]))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(STORED_GROUP) - 1), st.binary(min_size=1, max_size=4))
def test_damage_is_a_schema_error_or_another_group(place: int, wrong: bytes) -> None:
    """Bytes inside a number cannot be told from others; what breaks the form is named."""
    damaged = STORED_GROUP[:place] + wrong + STORED_GROUP[place + len(wrong) :]
    try:
        assert isinstance(wire.decode(Group, damaged), Group)
    except SchemaError as error:
        assert str(error)


@given(st.integers(0, len(STORED_GROUP) - 1))
def test_a_torn_record_is_refused(length: int) -> None:
    with pytest.raises(SchemaError):
        wire.decode(Group, STORED_GROUP[:length])


@given(st.binary(max_size=64))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(SchemaError):
        wire.decode(Group, data)


@pytest.mark.parametrize(
    "array",
    [["<c8", b"12345678"], ["<i4", b"123"], ["<i4"], 7, None, ["O", b""], ["<f4", b"1234"], {"a": 1}],
    ids=repr,
)
def test_a_wrong_array_is_refused(array: Any) -> None:
    version, body = msgspec.msgpack.decode(wire.encode(make_group([1.0]).members[0].rollout.rows[0]))
    body["tokens"] = array
    with pytest.raises(SchemaError):
        wire.decode(Row, msgspec.msgpack.encode((version, body)))


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int32), np.zeros(2, np.complex64), np.array(["a"])])
def test_arrays_without_a_wire_form_are_not_written(array: Any) -> None:
    row = make_group([1.0]).members[0].rollout.rows[0]
    with pytest.raises(SchemaError, match="cannot be stored"):
        wire.encode(msgspec.structs.replace(row, tokens=array))


def test_other_objects_have_no_wire_form() -> None:
    class Holder(Record, frozen=True, kw_only=True):
        what: Any

    with pytest.raises(NotImplementedError, match="no wire form"):
        wire.encode(Holder(what=object()))


def test_records_are_immutable_and_versions_print() -> None:
    version = PolicyVersion(run="r", step=3)
    with pytest.raises(AttributeError):
        version.step = 4  # type: ignore[misc]
    assert str(version) == "policy@0.3"
