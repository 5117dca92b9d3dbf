"""A configuration as a list of settings, with what differs from the defaults.

Role: the report's configuration table. Neighbours: `config` holds the tree and the docstrings. Invariant: a
field without a default counts as changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rollwright.config import RunConfig


@dataclass(frozen=True)
class Setting:
    """One key with its value and default as text, and what it is for."""

    key: str
    value: str
    default: str
    changed: bool
    help: str


def settings(config: RunConfig) -> list[Setting]:
    """Every setting of `config`, the changed ones first, each part in the order of the tree."""
    found = list(_walk(config, None, ""))
    return sorted(found, key=lambda setting: not setting.changed)


def _walk(model: BaseModel, default: Any, prefix: str) -> list[Setting]:
    """The settings of `model`; `default` is what the field that holds it has by default (None: no say)."""
    found: list[Setting] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        usual = field.get_default(call_default_factory=True, validated_data={})
        if type(default) is type(model):
            usual = getattr(default, name)
        if isinstance(value, BaseModel):
            found += _walk(value, usual, f"{prefix}{name}.")
            continue
        required = usual is PydanticUndefined
        found.append(
            Setting(
                key=prefix + name,
                value=_shown(value),
                default="required" if required else _shown(usual),
                changed=required or value != usual,
                help=" ".join((field.description or "").replace("`", "").split()),
            )
        )
    for name, value in (model.model_extra or {}).items():  # a class that is not imported: no say on defaults
        found.append(Setting(prefix + name, _shown(value), "unknown", True, ""))
    return found


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
