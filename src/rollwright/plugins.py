"""From a name in the configuration to an implementation, ours and other people's alike.

Role: one entry-point group per seam (`rollwright.engines`, `rollwright.sandboxes`, …); the entry's name is
the `type` in the configuration, its value a pydantic class whose `build(...)` imports what it needs.
Neighbours: `config.py` validates through `choice`. Invariant: built-ins are registered like plug-ins, in
`pyproject.toml`; nothing is imported before named.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Iterable
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from rollwright.errors import ConfigError, MissingExtra, PluginError
from rollwright.values import fits, shown, takes

BESIDE = "the module must lie beside the TOML file, in a folder that `imports` names, or on PYTHONPATH"
_BARE = re.compile(r"non-annotated attribute was detected: `(\w+)|Field '(\w+)' defined on a base class was")
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class PartConfig(BaseModel):
    """Base of every configuration class: frozen, unknown keys refused, values taken as they are written
    (`rollwright.values`). A table that gives some keys leaves the others at the field's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        default: Any = field.default
        if isinstance(default, PartConfig) and isinstance(value, dict):
            return _over(default, value)
        if not fits(field.annotation, value):
            raise PydanticCustomError("kind", "expected {kind}", {"kind": takes(field)})
        return value


def _over(default: PartConfig, table: dict[str, Any]) -> dict[str, Any]:
    """`table` with what it leaves out as in `default`."""
    tree: dict[str, Any] = {name: getattr(default, name) for name in type(default).model_fields}
    for name, value in table.items():
        below = tree.get(name)
        if isinstance(below, PartConfig) and isinstance(value, dict):
            value = _over(below, value)
        tree[name] = value
    return tree


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """Name → entry point of one seam."""
    return {point.name: point for point in entry_points(group=group)}


def import_from(folders: Iterable[str]) -> None:
    """Let `module:attribute` name modules in these folders; what is installed comes first, so that nothing in
    them takes another module's place."""
    sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)


def load(group: str, name: str) -> Any:
    """What is registered as `name`; `module:attribute` names something that is not registered.

    Raises:
        PluginError: nothing is, and the text names the nearest and all known names; or it cannot be
            imported.
        MissingExtra: it needs an optional dependency that is not there.
    """
    if ":" in name:
        if not _PLACE.fullmatch(name):
            raise PluginError(f"'{name}' names nothing: expected 'module:Class'")
        return _imported(EntryPoint(name=name, value=name, group=group), BESIDE)
    points = registered(group)
    if name not in points:
        near = difflib.get_close_matches(name, points, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        known = ", ".join(sorted(points)) or "none: is rollwright installed (pip install -e .)?"
        raise PluginError(f"no '{name}' in {group}{hint} Known: {known}")
    return _imported(points[name], f"mend or remove the package that registers it in {group}")


def _imported(point: EntryPoint, mend: str) -> Any:
    try:
        with redirect_stdout(sys.stderr):  # what a module prints is in no program's way
            return point.load()
    except MissingExtra:
        raise
    except Exception as error:  # boundary: a plug-in's code, which may fail in any way
        why = " ".join(_why(point, error, mend).split())
        raise PluginError(f"'{point.name}' cannot be imported: {why}") from error


def _why(point: EntryPoint, error: Exception, mend: str) -> str:
    """Which of the ways it was in which an import fails, and what to do."""
    if isinstance(error, ModuleNotFoundError) and _part_of(error.name, point.module):
        return f"no module '{error.name}'; {mend}"
    module = sys.modules.get(point.module)
    if isinstance(error, AttributeError) and module is not None:
        ours = error.obj is module and error.name == point.attr.partition(".")[0]
        if ours or not _raised_in(point.module, error):  # a module may raise it itself, in `__getattr__`
            return _no_attribute(point, module)
    if isinstance(error, PydanticUserError) and (bare := _BARE.search(str(error))):
        name = bare[1] or bare[2]
        where = _raised_in(point.module, error)
        return f"'{name}' has no type{where}: annotate it: `{name}: {_kind_of(name)} = …`"
    what = f"{type(error).__name__}: {error}"
    install = "; install what is missing" if isinstance(error, ModuleNotFoundError) else ""
    return f"the module raised {what}{_raised_in(point.module, error)}{install}"


def _part_of(missing: str | None, module: str) -> bool:
    """Whether the missing module is the one that was named, or a package above it."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def _no_attribute(point: EntryPoint, module: ModuleType) -> str:
    """A module without the attribute: a wrong name, or another module of the same name that came first."""
    attribute, file = point.attr.partition(".")[0], getattr(module, "__file__", None) or "built into Python"
    top = point.module.partition(".")[0]
    places = (Path(folder) / name for folder in sys.path for name in (f"{top}.py", f"{top}/__init__.py"))
    others = [place for place in places if place.is_file() and place.resolve() != Path(file).resolve()]
    if others and "." not in point.module:
        return (
            f"another module named '{top}' comes first ({file}), and has no '{attribute}': "
            f"give {others[-1]} another name"
        )
    near = difflib.get_close_matches(attribute, dir(module), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"the module '{point.module}' ({file}) has no '{attribute}'{hint or '; give it one'}"


def _raised_in(module: str, error: Exception) -> str:
    """` (file:line)` of the last line of the module that led to an error; nothing where none did."""
    stem = module.rpartition(".")[2]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).stem == stem]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _kind_of(name: str) -> str:
    """The annotation that a field of this name has in some configuration class."""
    kinds = [PartConfig]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if found := kind.__dict__.get("__pydantic_fields__", {}).get(name):
            annotation = found.annotation
            return annotation.__name__ if type(annotation) is type else str(annotation)
    return "TYPE"


def choose(group: str, value: Any, default: str) -> PartConfig:
    """The configuration object for `value`: one already, or a table whose `type` names the implementation."""
    if isinstance(value, PartConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"expected a table with a key 'type', got {shown(value)}")
    kind = value.get("type", default)
    if not isinstance(kind, str):
        raise ValueError(f"type: expected text that names an implementation, got {shown(kind)}")
    try:
        chosen = load(group, kind)
    except PluginError as error:
        raise ValueError(str(error)) from error
    if not (isinstance(chosen, type) and issubclass(chosen, PartConfig)):
        raise ValueError(
            f"'{kind}' is no configuration class: expected a subclass of rollwright.plugins.PartConfig"
        )
    if "type" not in chosen.model_fields:
        raise ValueError(f"'{kind}' has no field 'type': give its class one (type: str = {kind!r})")
    return chosen.model_validate(value)


def buildable(part: Any, branch: str) -> Any:
    """`part`, if its class can build something.

    Raises:
        ConfigError: a plug-in whose configuration class has no `build`.
    """
    if not callable(getattr(part, "build", None)):
        raise ConfigError(f"{branch}: {type(part).__name__} has no method 'build'; give its class one")
    return part
