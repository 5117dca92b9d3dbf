"""Measuring in turns: several contenders and the references R and P, one after another, round by round.

R is posix_spawn of `true`, P posix_spawn of `python3 -c pass` with the interpreter that runs this; what is
measured is told in units of one of them, taken in the same rounds: absolute times say little on a shared
machine.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import Cases

from rollwright.clock import SystemClock

PYTHON = os.path.realpath(sys.executable)
CLOCK = SystemClock()

Timed = Callable[[], Awaitable[float]]
"""One measurement: seconds of what is to be measured, without what prepares it."""


@dataclass
class Samples:
    """Seconds of each contender, in the order of the rounds."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Half of them are below."""
        return statistics.median(self.found[name])

    def quantile(self, name: str, share: float) -> float:
        """That share of them is below."""
        ordered = sorted(self.found[name])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def add(self, cases: Cases, case: str, name: str, reference: str) -> None:
        """A case: `name` in units of `reference`."""
        unit = self.median(reference)
        cases.add(
            case,
            1e3 * self.median(name),
            1e3 * unit,
            ratio=self.median(name) / unit,
            low=self.quantile(name, 0.05) / unit,
            high=self.quantile(name, 0.95) / unit,
            unit=f"× {reference}",
        )


async def rounds(samples: Samples, contenders: Mapping[str, Timed], count: int) -> None:
    """Measure all in turns, `count` times, after one round that does not count."""
    for number in range(count + 1):
        for name, once in contenders.items():
            seconds = await once()
            if number:
                samples.found.setdefault(name, []).append(seconds)


def spawned(argv: Sequence[str]) -> float:
    """Seconds from starting a program to its end."""
    began = CLOCK.now()
    pid = os.posix_spawn(argv[0], argv, os.environ)
    status = os.waitpid(pid, 0)[1]
    seconds = CLOCK.now() - began
    if status:
        raise SystemExit(f"{argv} ended with {status}")
    return seconds


async def reference_true() -> float:
    """R."""
    return spawned(("/usr/bin/true",))


async def reference_python() -> float:
    """P."""
    return spawned((PYTHON, "-c", "pass"))


REFERENCES: dict[str, Timed] = {"R": reference_true, "P": reference_python}


def descendants() -> list[int]:
    """Processes below this one, zombies left out."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {os.getpid()})
