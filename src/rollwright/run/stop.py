"""The wish to stop, from a signal to whoever works.

Role: one flag with listeners. Neighbours: `process` sets it, `leases` turns it into revoked leases.
Invariant: asked once, it stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Stop:
    """Asked for by the first SIGINT or SIGTERM."""

    asked: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def ask(self) -> None:
        """Stop after the present piece of work."""
        self.asked = True
        for callback in self.callbacks:
            callback()
