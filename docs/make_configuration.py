"""Prints `configuration.md`, made from the configuration classes: fields, defaults, bounds, docstrings.

    python docs/make_configuration.py > docs/configuration.md

Role: the reference cannot drift from the code. Neighbours: `rollwright.config` and the entry points of
`pyproject.toml`; `tests/unit/test_docs.py` compares the committed page. Invariant: only what this package
registers is listed, so that an installed plug-in changes nothing.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rollwright.config import CHOICES, RunConfig
from rollwright.plugins import registered

INTRO = """\
# Configuration

*Made from the code by `docs/make_configuration.py`: change the docstrings there, not this page.*

A run is described by one tree. It is read from TOML files, each laid over the one before, then from `--set`
flags:

```bash
rollwright train examples/records.toml mine.toml --set loop.steps=20 --set 'tasks.system="…"'
```

The value of `--set` is TOML; a bare word counts as text. An unknown key is refused with the nearest known
one, a value out of bounds with what was expected, and so are keys that contradict each other. The resolved
tree is saved as `config.json` in the run folder. Environment variables configure nothing.

Where `type` is said to name an implementation, it is one of those listed, one that an installed plug-in
registers, or `module:Class`: a configuration class that Python can import (mind `PYTHONPATH`).

Every key has a default but those marked *required*, so that an empty file is a configuration too.
"""

NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def toml(value: object) -> str:
    """A default as TOML."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return "[" + ", ".join(toml(each) for each in value) + "]"
        case int() | float():
            return repr(value)
        case dict():
            return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def kind(annotation: Any) -> str:
    """What a field takes, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{toml(each)}`" for each in arguments)
    if origin is dict:
        return "table"
    if origin is tuple and arguments[-1:] == (...,):
        return f"list of {kind(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} × {kind(arguments[0])}"
    if origin in (Union, UnionType):
        return " or ".join(kind(each) for each in arguments)
    return NAMES[annotation]


def bounds(field: FieldInfo) -> str:
    """Its bounds, as `, ≥ 1`."""
    found = [
        f"{sign} {getattr(each, name):g}"
        for each in field.metadata
        for name, sign in SIGNS.items()
        if hasattr(each, name)
    ]
    found += [f"`{each.pattern}`" for each in field.metadata if getattr(each, "pattern", None)]
    return "".join(f", {each}" for each in found)


def told(*texts: str | None) -> str:
    """Docstrings one after another, a repetition left out."""
    return " ".join(dict.fromkeys(filter(None, map(plain, texts)))) + "\n"


def plain(text: str | None) -> str:
    """A docstring in one line, as a table cell."""
    return " ".join((text or "").split()).replace("|", "\\|")


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Field → default of a class; `PydanticUndefined` where one is required."""
    return {
        name: field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
        for name, field in model.model_fields.items()
    }


def rows(model: type[BaseModel], values: Mapping[str, Any], leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """A table of the fields that are values, not tables."""
    yield "| key | default | takes | |"
    yield "| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        value = values[name]
        if isinstance(value, BaseModel) or name in leave_out:
            continue
        given = "*required*" if value is PydanticUndefined else f"`{toml(value)}`"
        takes = kind(field.annotation) + bounds(field)
        yield f"| `{name}` | {given} | {takes} | {plain(field.description)} |"
    yield ""


def below(path: str, values: Mapping[str, Any], model: type[BaseModel], level: str) -> Iterator[str]:
    """The tables inside a table."""
    for name, value in values.items():
        if isinstance(value, BaseModel):
            yield f"{level} `[{path}.{name}]`\n"
            yield told(model.model_fields[name].description, type(value).__doc__)
            yield from rows(type(value), dict(value))
            yield from below(f"{path}.{name}", dict(value), type(value), level + "#")


def chosen(branch: str) -> Iterator[str]:
    """Every implementation of a branch whose `type` names one; the default first."""
    group, default = CHOICES[branch]
    ours = {name: point for name, point in registered(group).items() if _ours(point.dist)}
    for name in sorted(ours, key=lambda each: (each != default, each)):
        model = ours[name].load()
        values = defaults(model)
        note = " (default)" if name == default else ""
        yield f'### `{branch}.type = "{name}"`{note}\n'
        yield f"{inspect.cleandoc(model.__doc__ or '')}\n"
        if len(model.model_fields) > 1:
            yield from rows(model, values, ("type",))
        yield from below(branch, values, model, "####")


def _ours(distribution: Any) -> bool:
    return distribution is not None and distribution.name == "rollwright"


def page() -> str:
    """The whole page."""
    values = defaults(RunConfig)
    lines = [INTRO, "## Top level\n", *rows(RunConfig, values)]
    for name, field in RunConfig.model_fields.items():
        if name in CHOICES:
            lines += [f"## `[{name}]`\n", told(field.description), *chosen(name)]
        elif isinstance(values[name], BaseModel):
            model = type(values[name])
            lines += [f"## `[{name}]`\n", told(field.description, model.__doc__)]
            lines += [*rows(model, dict(values[name])), *below(name, dict(values[name]), model, "###")]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
