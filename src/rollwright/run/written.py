"""A configuration written out as TOML, defaults marked or left out.

Role: what `rollwright config` prints. Neighbours: `config` reads it back. Invariants: what is written loads
back to an equal tree, with and without the defaults; a key is marked where it has the value that leaving it
out would give.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from rollwright.config import CHOICES, RunConfig
from rollwright.plugins import PartConfig

MARK = "  # default"


def toml(config: RunConfig, *, changed: bool) -> str:
    """All keys, the defaults marked; or only what was `changed`."""
    lines = list(_table("", config, defaults(config), changed))
    return "\n".join(lines).strip() + "\n" if lines else ""


def differing(config: RunConfig) -> dict[str, Any]:
    """The JSON tree of the keys that differ from their defaults."""
    return _differing(config, defaults(config))


def defaults(part: PartConfig) -> dict[str, Any]:
    """Key → the value it has when it is left out; `PydanticUndefined` where it is required."""
    found = {}
    for name, field in type(part).model_fields.items():
        found[name] = field.get_default(call_default_factory=True)
        value = getattr(part, name)
        if isinstance(value, PartConfig) and type(value) is not type(found[name]):
            found[name] = PydanticUndefined  # another implementation
    return found


def _below(name: str, value: PartConfig, default: Any) -> dict[str, Any]:
    """The defaults of a table: those that the field gives, or, of another implementation, its own."""
    if isinstance(default, PartConfig):
        return {key: getattr(default, key) for key in type(default).model_fields}
    own = defaults(value)
    return own | ({"type": PydanticUndefined} if name in CHOICES else {})


def _table(path: str, part: PartConfig, default: Mapping[str, Any], changed: bool) -> Iterator[str]:
    values = {name: getattr(part, name) for name in type(part).model_fields}
    tables = {name: value for name, value in values.items() if isinstance(value, PartConfig)}
    lines = []
    for name, value in values.items():
        same = _same(value, default[name])
        if name in tables or value is None or (changed and same):
            continue
        lines.append(f"{_key(name)} = {literal(value)}" + (MARK if same and not changed else ""))
    if lines:
        yield from [f"\n[{path}]"] * bool(path)
        yield from lines
    for name, table in tables.items():
        if not (changed and _same(table, default[name])):
            inner = f"{path}.{name}" if path else name
            yield from _table(inner, table, _below(name, table, default[name]), changed)


def _differing(part: PartConfig, default: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    whole = part.model_dump(mode="json")
    for name in type(part).model_fields:
        value = getattr(part, name)
        if _same(value, default[name]):
            continue
        nested = isinstance(value, PartConfig)
        tree[name] = _differing(value, _below(name, value, default[name])) if nested else whole[name]
    return tree


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def literal(value: Any) -> str:
    """A value as TOML.

    Raises:
        TypeError: TOML has no such value.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))} = {literal(each)}" for key, each in value.items()) + "}"
    raise TypeError(f"{type(value).__name__} cannot be written as TOML")


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else literal(name)
