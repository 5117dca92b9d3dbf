"""Asking a vendor: a deadline on every question, and the questions worth repeating repeated.

Role: bounds and backoff. Neighbours: `instance` and `provider` ask through it. Invariants: nothing waits
longer than it was told to; repeats are few and spaced by the clock handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollwright.clock import Clock, within
from rollwright.errors import DeadlineExceeded, SandboxUnavailable
from rollwright.sandbox.remote.adapter import Busy, Unreachable

ASK_SECONDS = 30.0
"""How long one question to a vendor may take, its repeats included."""
TRIES = 6
_FIRST_SECONDS, _MOST_SECONDS = 0.25, 8.0
_OVER_SECONDS = 2.0
"""Given to the SDK's own deadline to fire first: it says more than ours."""

T = TypeVar("T")


async def asked(
    clock: Clock, what: str, ask: Callable[[float], Awaitable[T]], seconds: float | None = None
) -> T:
    """What `ask(timeout)` gives. It is asked again, after 0.25, 0.5, 1, … s, at most `TRIES` times in all and
    not past `seconds` (else `ASK_SECONDS`), where the vendor is `Busy` or `Unreachable`.

    Raises:
        DeadlineExceeded: no answer within `seconds`.
        SandboxUnavailable: it was busy to the end.
        Unreachable: it was not reached to the end.
    """
    seconds = ASK_SECONDS if seconds is None else seconds
    began, wait = clock.now(), _FIRST_SECONDS
    for tried in range(1, TRIES + 1):
        left = seconds - (clock.now() - began)
        try:
            return await within(clock, ask(max(left, 0.001)), max(left, 0.0) + _OVER_SECONDS, what)
        except (Busy, Unreachable) as error:
            if tried == TRIES or clock.now() - began + wait >= seconds:
                if isinstance(error, Busy):
                    how = "Ask for fewer at once (`max_live`), or for a higher quota"
                    raise SandboxUnavailable(f"{what}: {error} ({tried} times). {how}") from error
                raise
        await clock.sleep(wait)
        wait = min(2 * wait, _MOST_SECONDS)
    raise DeadlineExceeded(what, seconds)
