"""The tools there are, under seal.

Role: names, schemas, and the only place that holds tools. Neighbours: `door` asks; built-ins and plug-ins
come from entry-point group `rollwright.tools`. Invariants: what is registered is sealed and its schema is
valid; the registry gives out specs, never a tool; the `Mint` is given away once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jsonschema_rs

from rollwright.errors import DoorError, PluginError
from rollwright.plugins import load, registered
from rollwright.tools.base import Action, Arguments, Tool
from rollwright.tools.sealed import Mint, Permit, run_sealed, seal
from rollwright.types import Json, ToolResult, ToolSpec

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ToolRegistry:
    """Tools by name."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        self._specs: dict[str, ToolSpec] = {}
        self._validators: dict[str, Any] = {}
        self._mint: Mint | None = Mint()
        for tool in tools:
            self.register(tool)

    @classmethod
    def installed(cls) -> ToolRegistry:
        """With everything in entry-point group `rollwright.tools`: classes that are built without
        arguments."""
        group = "rollwright.tools"
        return cls(load(group, name)() for name in sorted(registered(group)))

    def register(self, tool: Tool) -> None:
        """Take a tool and put the seal on its class.

        Raises:
            PluginError: not a tool, a name that is taken or malformed, or a schema that is none.
        """
        spec = getattr(tool, "spec", None)
        if not isinstance(spec, ToolSpec):
            raise PluginError(
                f"{type(tool).__name__} is no tool: expected an attribute `spec` of type ToolSpec"
            )
        if not _NAME.fullmatch(spec.name):
            raise PluginError(f"tool name {spec.name!r}: expected small letters, digits and _, 64 at most")
        if spec.name in self._tools:
            raise PluginError(f"a tool named '{spec.name}' is registered already; rename one of them")
        try:
            validator = jsonschema_rs.validator_for(spec.parameters)
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise PluginError(f"tool '{spec.name}': its parameters are no JSON schema: {error}") from error
        if spec.parameters.get("type") != "object":
            raise PluginError(f'tool \'{spec.name}\': expected parameters with "type": "object"')
        seal(tool)
        self._tools[spec.name] = tool
        self._specs[spec.name] = spec
        self._validators[spec.name] = validator

    def claim_mint(self) -> Mint:
        """The right to permit calls, for the one door of this registry. Raises `DoorError` the second
        time."""
        if self._mint is None:
            raise DoorError("this registry has a door already; a second one would be a second way to act")
        mint, self._mint = self._mint, None
        return mint

    def spec(self, name: str) -> ToolSpec | None:
        """The spec of that name, if there is such a tool."""
        return self._specs.get(name)

    def specs(self, names: Sequence[str]) -> tuple[ToolSpec, ...]:
        """Specs in the order of `names`. Raises `PluginError` for an unknown one."""
        for name in names:
            if name not in self._specs:
                known = ", ".join(sorted(self._specs)) or "none"
                raise PluginError(f"no tool '{name}'{nearest(name, self._specs)} Known: {known}")
        return tuple(self._specs[name] for name in names)

    def problem(self, name: str, arguments: Json) -> str | None:
        """What is wrong with arguments for that tool, in one line; None where nothing is."""
        if not isinstance(arguments, dict):
            return f"arguments must be an object, got {type(arguments).__name__}"
        try:
            self._validators[name].validate(arguments)
        except jsonschema_rs.ValidationError as error:
            where = "/".join(map(str, error.instance_path))
            return f"{where}: {error.message}" if where else str(error.message)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return f"arguments are not JSON: {error}"
        return None

    async def redeem(self, permit: Permit, arguments: Arguments, action: Action) -> ToolResult:
        """Run the tool the permit is for. Raises `DoorError` for a permit that no door minted."""
        return await run_sealed(self._tools[permit.tool], permit, arguments, action)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where something is near, else `;`."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ";"
