"""The wish to stop, from a signal to whoever works.

Role: one flag with listeners, and an exception for work that keeps nothing. Neighbours: `process` sets the
flag, `leases` turns it into revoked leases; `assess` is stoppable. Invariant: asked once, it stays.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


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


class Stopped(Exception):
    """A signal ended the work; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Work that SIGINT, SIGTERM and SIGHUP end in order: whatever it opened is closed, then `Stopped` is
    raised. In the main thread only. The two latter come in as the first one, which asyncio turns into a
    cancelled task."""
    came: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        came.append(number)
        signal.raise_signal(signal.SIGINT)

    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in kinds}
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(came[0] if came else signal.SIGINT) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
