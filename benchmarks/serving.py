"""What the engine benchmarks share: one thread, prompts, our engine over a model, ratios with their spread.

Seconds are CPU seconds of this process. Each contender computes in one thread, so that is its wall time on an
idle machine; a neighbour that takes the core for a while does not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from harness import Cases

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.events import NullSink
from rollwright.model.decoder import Decoder
from rollwright.types import Ints, PolicyVersion

VERSION = PolicyVersion(run="bench")


@dataclass(frozen=True)
class CpuClock:
    """CPU seconds of this process, all threads."""

    def now(self) -> float:
        """Seconds since it started."""
        return time.process_time()


def one_thread() -> None:
    """Compute in one thread; threads of OpenMP that wait must not spin."""
    import torch

    if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        raise SystemExit("set OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive: waiting threads spin otherwise")
    torch.set_num_threads(1)


def prompts(rng: np.random.Generator, lengths: Sequence[int], vocab: int) -> list[Ints]:
    """Random ids, one prompt for each length."""
    return [rng.integers(0, vocab, length, dtype=np.int32) for length in lengths]


def engine(decoder: Decoder, config: EmbeddedConfig) -> Engine:
    """Our engine; `start` and `close` are the caller's."""
    return config.build(decoder, VERSION, SystemClock(), NullSink())


@dataclass
class Rates:
    """What each contender reached in each round; rounds are interleaved."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def add(self, who: str, rate: float) -> None:
        """One round's rate."""
        self.found.setdefault(who, []).append(rate)

    def compare(self, cases: Cases, case: str, ours: str, theirs: str, unit: str) -> float:
        """Add and give the median of the rounds' ratios ours / theirs; the spread is least to greatest."""
        a, b = self.found[ours], self.found[theirs]
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        cases.add(
            case,
            statistics.median(a),
            statistics.median(b),
            ratio=statistics.median(ratios),
            low=min(ratios),
            high=max(ratios),
            unit=unit,
        )
        return statistics.median(ratios)
