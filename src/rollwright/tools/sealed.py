"""The seal: a tool runs only against a permit that the door minted for exactly this call.

Role: makes "past the door" an error instead of a habit. Neighbours: `registry` seals every tool it takes,
`door` holds the registry's one `Mint`. Invariants: a permit is good once, for one action id, one tool and one
digest of arguments; without one, `_run` raises `DoorError` before any of the tool's code runs. (This keeps
code honest; a hostile plug-in in our own process could undo it, so agent code never runs in our process.)
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from rollwright.errors import DoorError, PluginError
from rollwright.tools.base import Action, Arguments, Tool
from rollwright.types import Json, ToolResult, ToolSpec

_canonical = msgspec.json.Encoder(order="sorted")


def canonical(value: Json) -> str:
    """`value` as JSON with sorted keys; what has no JSON form as its Python form. Never raises."""
    try:
        return _canonical.encode(value).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        pass
    try:
        return ascii(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} without a text form"


def digest(text: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


class Permit:
    """The right to run `tool` once, for action `call` with the arguments of this `digest`. Building one
    grants nothing: only what a `Mint` made counts."""

    __slots__ = ("call", "digest", "tool")

    def __init__(self, call: str, tool: str, digest: str) -> None:
        self.call, self.tool, self.digest = call, tool, digest


_unspent: set[Permit] = set()


class Mint:
    """Makes permits. A registry has one and gives it away once, to its door."""

    def permit(self, call: str, tool: str, arguments: str) -> Permit:
        """A fresh permit for arguments of that digest; `revoke` it when the call is over."""
        permit = Permit(call, tool, arguments)
        _unspent.add(permit)
        return permit

    def revoke(self, permit: Permit) -> None:
        """It counts no more, spent or not."""
        _unspent.discard(permit)


def _spend(permit: Permit | None, tool: str, action: Action, arguments: Arguments) -> None:
    if permit not in _unspent or permit is None:
        raise DoorError(f"tool '{tool}' was called without a permit; call Door.invoke with an Action instead")
    _unspent.remove(permit)
    if (permit.tool, permit.call, permit.digest) != (tool, action.call.id, digest(canonical(arguments))):
        raise DoorError(f"tool '{tool}' was called with the permit of another call ({permit.tool})")


def _seal_class(kind: type) -> None:
    run = kind.__dict__.get("_run")
    if run is None or getattr(run, "sealed", False) or getattr(run, "__isabstractmethod__", False):
        return

    async def sealed(
        self: Tool, arguments: Arguments, action: Action, permit: Permit | None = None
    ) -> ToolResult:
        _spend(permit, self.spec.name, action, arguments)
        result: ToolResult = await run(self, arguments, action)
        return result

    sealed.sealed = True  # type: ignore[attr-defined]
    sealed.__doc__ = run.__doc__
    kind._run = sealed  # type: ignore[attr-defined]


def seal(tool: Tool) -> None:
    """Put the seal on a tool whose class doesn't derive from `SealedTool`.

    Raises:
        PluginError: it has no `_run` of its class that could be sealed.
    """
    if "_run" in getattr(tool, "__dict__", {}) or not hasattr(type(tool), "_run"):
        raise PluginError(
            f"{type(tool).__name__}: expected a method `async def _run(self, arguments, action)` of the class"
        )
    for kind in type(tool).__mro__:
        if not getattr(kind, "_is_protocol", False):
            try:
                _seal_class(kind)
            except TypeError as error:
                raise PluginError(f"{kind.__name__} cannot be sealed: {error}") from error


async def run_sealed(tool: Tool, permit: Permit, arguments: Arguments, action: Action) -> ToolResult:
    """Run a sealed tool, spending `permit`. Raises `DoorError` where it is not for this call."""
    sealed: Any = type(tool)._run
    result: ToolResult = await sealed(tool, arguments, action, permit)
    return result


class SealedTool(ABC):
    """Base of tools: give it a `spec` and write `_run`. Subclasses are sealed when they are made; build on
    another tool by composition through the door, a `super()._run(...)` is past it."""

    spec: ToolSpec

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _seal_class(cls)

    @abstractmethod
    async def _run(self, arguments: Arguments, action: Action) -> ToolResult:
        """Do it within `action.timeout` seconds; bad arguments and failures become a `ToolResult`."""
