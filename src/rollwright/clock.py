"""Time, as a part that is handed in.

Role: one small seam for now, wall time and sleep, so that deadlines can be tested without waiting.
Neighbours: every part that waits takes a `Clock`. Invariant: nothing outside this file calls `time` to decide anything.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic and wall seconds, and an asynchronous sleep."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""

    def wall(self) -> float:
        """Seconds since the Unix epoch, for records people read."""

    async def sleep(self, seconds: float) -> None:
        """Give way for `seconds`."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
