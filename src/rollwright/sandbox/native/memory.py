"""Data that is too long for a message, as a descriptor of memory.

Role: carries files between host and sandbox. Neighbours: `place` and `inside`. Invariant: standard library
only.
"""

from __future__ import annotations

import os


def hold(data: bytes) -> int:
    """A descriptor that holds `data`; the caller closes it."""
    descriptor = os.memfd_create("data", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


def held(descriptor: int) -> bytes:
    """What it holds."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()
