"""One of several engines, as `replicas` sees it.

Role: its state. Neighbours: `replicas` alone changes it. Invariant: one that is `dead` gets nothing until it
says itself that it is ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollwright.engine.base import Engine, Health


@dataclass(eq=False)
class Replica:
    """One engine: what it has to do, and whether it may get more."""

    engine: Engine
    number: int
    flights: set[str] = field(default_factory=set)
    dead: str = ""
    """Why it gets no traffic."""
    unfit: bool = False
    """It has not the weights of the last update; the next good one mends it."""
    asleep: bool = False
    """It says itself that it isn't ready, though nobody paused it here."""
    last: Health | None = None
