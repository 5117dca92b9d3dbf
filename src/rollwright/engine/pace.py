"""How steadily an engine decodes: tokens per second over windows, and the gaps between tokens.

Role: two of the three live figures of an engine (the third, the prefix hit rate, is two counters).
Neighbours: the engine tells it of every step and puts its figures into `Health`. Invariants: only time spent
computing counts, so an engine that waits for tools is not an unstable one; a figure without data is None.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

WINDOW = 1.0
"""Busy seconds of one window."""
WINDOWS = 60
"""Windows that the figures are of, the newest."""
KEPT = 65_536
"""Gaps after which an earlier one counts half."""

LOWEST, HIGHEST = 1e-6, 1e4
"""Gaps are told between these, in seconds."""
RATIO = 1.08
"""From one bucket of gaps to the next; its middle is off by √RATIO - 1, 4 %, at most."""
_LOG_LOWEST, _LOG_RATIO = np.float32(math.log(LOWEST)), np.float32(math.log(RATIO))
_BUCKETS = math.ceil(math.log(HIGHEST / LOWEST, RATIO)) + 1
_FOLD = 64
"""Steps whose gaps are put into their buckets together."""


class Pace:
    """The pace of one engine. Cheap enough to be told of every step: a few microseconds."""

    def __init__(self) -> None:
        self._busy, self._tokens = 0.0, 0  # of the window that goes on
        self._windows: deque[tuple[float, int]] = deque(maxlen=WINDOWS)
        self._fresh: list[npt.NDArray[np.float32]] = []
        self._counts = np.zeros(_BUCKETS)

    def step(self, seconds: float, tokens: int) -> None:
        """A step that computed for `seconds` and sampled `tokens`; prefill in it slows decoding and counts.

        A window ends with the step that makes it a second long, so a longer step is a window of its own.
        """
        self._busy += seconds
        self._tokens += tokens
        if self._busy >= WINDOW:
            self._windows.append((self._busy, self._tokens))
            self._busy, self._tokens = 0.0, 0

    def gaps(self, seconds: Seconds) -> None:
        """float64[n] wall seconds between the token that a step gave a request and the one before it, of
        those requests that had one. The array is copied."""
        if len(seconds):
            self._fresh.append(seconds.astype(np.float32))
            if len(self._fresh) >= _FOLD:
                self._fold()

    @property
    def rate(self) -> float | None:
        """Tokens per busy second over the last windows; None before the first is over."""
        if not self._windows:
            return None
        return sum(tokens for _, tokens in self._windows) / sum(busy for busy, _ in self._windows)

    @property
    def rate_variation(self) -> float | None:
        """Coefficient of variation (standard deviation / mean) of tokens per second over the last windows;
        None of fewer than two, or of windows without a token."""
        rates = [tokens / busy for busy, tokens in self._windows]
        if len(rates) < 2 or not any(rates):
            return None
        return statistics.stdev(rates) / statistics.fmean(rates)

    @property
    def gap_p99(self) -> float | None:
        """99th percentile of the gaps in seconds, within 4 %; None before the first. Newer gaps weigh more:
        a gap that `KEPT` others came after counts half."""
        self._fold()
        sums = self._counts.cumsum()
        if not sums[-1]:
            return None
        bucket = int(np.searchsorted(sums, 0.99 * sums[-1]))
        return float(LOWEST * RATIO ** (bucket + 0.5))

    def _fold(self) -> None:
        """Put fresh gaps into their buckets."""
        if not self._fresh:
            return
        seconds = np.concatenate(self._fresh)
        self._fresh.clear()
        np.clip(seconds, LOWEST, HIGHEST, out=seconds)
        np.log(seconds, out=seconds)
        buckets = ((seconds - _LOG_LOWEST) / _LOG_RATIO).astype(np.intp)
        self._counts *= 0.5 ** (len(buckets) / KEPT)
        self._counts += np.bincount(buckets, minlength=_BUCKETS)
