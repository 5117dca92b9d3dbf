"""From a name in the configuration to an implementation, ours and other people's alike.

Role: one entry-point group per seam (`rollwright.engines`, `rollwright.sandboxes`, …); the entry's name is
the `type` in the configuration, its value a pydantic class whose `build(...)` imports what it needs.
Neighbours: `config.py` validates through `choice`. Invariant: built-ins are registered like plug-ins, in
`pyproject.toml`; nothing is imported before named.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollwright.errors import ConfigError, PluginError


class PartConfig(BaseModel):
    """Base of every configuration class: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """Name → entry point of one seam."""
    return {point.name: point for point in entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """What is registered as `name`; `module:attribute` names something that is not registered.

    Raises:
        PluginError: nothing is; the text names the nearest and all known names.
    """
    if ":" in name:
        try:
            return EntryPoint(name=name, value=name, group=group).load()
        except (ImportError, AttributeError) as error:
            raise PluginError(f"'{name}' cannot be imported: {error}; it must be on PYTHONPATH") from error
    points = registered(group)
    if name not in points:
        near = difflib.get_close_matches(name, points, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        known = ", ".join(sorted(points)) or "none: is rollwright installed (pip install -e .)?"
        raise PluginError(f"no '{name}' in {group}{hint} Known: {known}")
    return points[name].load()


def choose(group: str, value: Any, default: str) -> PartConfig:
    """The configuration object for `value`: one already, or a table whose `type` names the implementation."""
    if isinstance(value, PartConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"expected a table with a key 'type', got {type(value).__name__}")
    kind = value.get("type", default)
    try:
        chosen = load(group, str(kind))
    except PluginError as error:
        raise ValueError(str(error)) from error
    built = chosen.model_validate(value)
    assert isinstance(built, PartConfig)
    return built


def buildable(part: Any, branch: str) -> Any:
    """`part`, if its class can build something.

    Raises:
        ConfigError: a plug-in whose configuration class has no `build`.
    """
    if not callable(getattr(part, "build", None)):
        raise ConfigError(f"{branch}: {type(part).__name__} has no method 'build'")
    return part
