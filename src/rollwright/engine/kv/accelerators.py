"""Accelerators by name: memory, bandwidth and peak, from their vendors' data sheets.

Role: what `--card h100` means. Neighbours: `plan` takes the figures. Invariant: nominal figures, dense
(no sparsity), 16-bit; what a driver keeps for itself belongs into the reserve.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from rollwright.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """One device."""

    name: str
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second of its memory."""
    flops: float
    """Floating-point operations per second, 16-bit dense."""


ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator("t4", 16 * GIB, 0.320e12, 65e12),
        Accelerator("a10g", 24 * GIB, 0.600e12, 70e12),
        Accelerator("l4", 24 * GIB, 0.300e12, 121e12),
        Accelerator("rtx4090", 24 * GIB, 1.008e12, 165e12),
        Accelerator("l40s", 48 * GIB, 0.864e12, 362e12),
        Accelerator("a100-40", 40 * GIB, 1.555e12, 312e12),
        Accelerator("a100", 80 * GIB, 2.039e12, 312e12),
        Accelerator("h100", 80 * GIB, 3.35e12, 989e12),
        Accelerator("h200", 141 * GIB, 4.8e12, 989e12),
        Accelerator("b200", 180 * GIB, 8.0e12, 2250e12),
        Accelerator("mi300x", 192 * GIB, 5.3e12, 1307e12),
    )
}
"""By the name that `--card` takes."""


def accelerator(name: str) -> Accelerator:
    """The device of that name.

    Raises:
        ConfigError: none is.
    """
    found = ACCELERATORS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), ACCELERATORS, n=1)
        mean = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"--card {name}: no such card; {mean}known: {', '.join(ACCELERATORS)}; or give --memory, "
            "--bandwidth and --tflops"
        )
    return found
