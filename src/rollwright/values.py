"""What a key of the configuration takes: the check of types, and the words for it.

Role: a value is taken as it is written, never bent into shape: `"3"` is no 3, `true` is no 1, `1.5` is no
integer. Neighbours: `plugins.PartConfig` asks before pydantic does, `config` words its errors with it.
Invariants: what `fits` lets through loses nothing by pydantic's conversion; lists become tuples and texts
paths, because TOML and JSON have neither; an integer is a number.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_NAMES: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_NAMES |= {Path: "a path", NoneType: "nothing", dict: "a table", list: "a list", tuple: "a list"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_LONGEST = 60


def fits(kind: Any, value: Any) -> bool:
    """Whether `value` has the type that the annotation `kind` names; kinds unknown here are left to
    pydantic."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(arguments[0], value)
    if origin in (Union, UnionType):
        return any(fits(each, value) for each in arguments)
    if origin is Literal:
        return any(type(each) is type(value) and each == value for each in arguments)
    if origin in (tuple, list, set, frozenset):
        return _items_fit(origin, arguments, value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(arguments[1], each) for each in value.values())
    if kind is float:
        return type(value) in (int, float)
    if kind in (bool, int):
        return type(value) is kind
    if kind is str:
        return isinstance(value, str)
    if kind is Path:
        return isinstance(value, str | Path)
    return True


def _items_fit(origin: Any, arguments: tuple[Any, ...], value: Any) -> bool:
    if not isinstance(value, list | tuple | set | frozenset):
        return False
    if origin is tuple and arguments[-1:] != (...,):
        return len(value) == len(arguments) and all(map(fits, arguments, value))
    return all(fits(arguments[0], each) for each in value)


def takes(field: FieldInfo) -> str:
    """What a field takes, in words: `an integer ≥ 1`."""
    bounds = " and ".join(told for each in field.metadata for told in _bounds(each))
    return f"{_kind(field.annotation)} {bounds}".strip()


def _kind(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = " and ".join(told for each in arguments[1:] for told in _bounds(each))
        return f"{_kind(arguments[0])} {bounds}".strip()
    if origin in (Union, UnionType):
        return " or ".join(map(_kind, arguments))
    if origin is Literal:
        return " or ".join(map(shown, arguments))
    if origin is tuple and arguments[-1:] != (...,):
        return f"a list of {len(arguments)} values, each {_kind(arguments[0])}"
    if origin in (tuple, list, set, frozenset):
        return f"a list, each value {_kind(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a table"
    return _NAMES.get(origin or kind, getattr(kind, "__name__", str(kind)))


def _bounds(constraint: Any) -> list[str]:
    told = [
        f"{sign} {getattr(constraint, name)}" for name, sign in _SIGNS.items() if hasattr(constraint, name)
    ]
    for name, words in (
        ("pattern", "that matches {}"),
        ("min_length", "of length ≥ {}"),
        ("max_length", "of length ≤ {}"),
    ):
        if (bound := getattr(constraint, name, None)) is not None:
            told.append(words.format(bound))
    return told


def shown(value: Any) -> str:
    """A value as a person would write it in TOML, cut short, in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | BaseModel):
        return "a table"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, str | Path):
        text = '"' + " ".join(str(value).split()) + '"'
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def advice(field: FieldInfo, value: Any) -> str:
    """What to do about a wrong value, beginning with `; `; nothing where it goes without saying."""
    if isinstance(value, float) and not math.isfinite(value):
        return "; it must be finite"
    if not isinstance(value, str):
        return ""
    choices = [each for each in get_args(field.annotation) if isinstance(each, str)]
    if get_origin(field.annotation) is Literal and choices:
        near = difflib.get_close_matches(value, choices, n=1)
        return f"; did you mean {shown(near[0])}?" if near else ""
    for kind, read in ((bool, {"true": True, "false": False}.get), (int, _number), (float, _number)):
        if field.annotation is kind and fits(kind, read(value.strip())):
            return f"; write {value.strip()} without quotes"
    return ""


def _number(text: str) -> int | float | None:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None
