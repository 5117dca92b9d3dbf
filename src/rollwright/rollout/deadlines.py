"""When a rollout must end, and which outcome a failure is.

Role: the one mapping from errors to `Outcome`. Neighbours: `attempt` runs rollouts under these deadlines.
Invariant: every failure has exactly one outcome, and none of them is a wrong answer.
"""

from __future__ import annotations

import asyncio

from rollwright.clock import Clock
from rollwright.errors import DeadlineExceeded, EngineError, LeaseRevoked, SandboxError
from rollwright.types import Outcome


class Window:
    """A group's time: it opens with the group's first rollout, so that waiting for a slot costs nothing."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._opened = asyncio.Event()
        self.ends: float | None = None
        """`clock.now()` at which it is over; None while it has not opened."""

    def open(self) -> float:
        """Open it, once; when it ends."""
        if self.ends is None:
            self.ends = self._clock.now() + self._seconds
            self._opened.set()
        return self.ends

    @property
    def over(self) -> bool:
        """Whether its time is up."""
        return self.ends is not None and self._clock.now() >= self.ends

    async def wait_over(self) -> None:
        """Return when its time is up."""
        await self._opened.wait()
        while not self.over:
            await self._clock.sleep(self.open() - self._clock.now())


def outcome_of(error: BaseException, window: Window | None = None) -> Outcome:
    """How a rollout ended that was stopped by `error`.

    Late and cancelled rollouts are told apart by whether the group's `window` is over.
    """
    late = window is not None and window.over
    match error:
        case SandboxError():
            return Outcome.SANDBOX_LOST
        case EngineError():
            return Outcome.ENGINE_ERROR
        case LeaseRevoked():
            return Outcome.REVOKED
        case DeadlineExceeded():
            return Outcome.GROUP_TIMEOUT if late else Outcome.ROLLOUT_TIMEOUT
        case asyncio.CancelledError():
            return Outcome.GROUP_TIMEOUT if late else Outcome.CANCELLED
    return Outcome.ERROR
