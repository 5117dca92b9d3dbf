"""Bytes as people write and read them.

Role: `80GiB` to a number and back. Neighbours: `plan`, `picture` and the command. Invariant: GB is 10⁹ and
GiB 2³⁰; a size without a unit is bytes.
"""

from __future__ import annotations

import re

from rollwright.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate("kMGT")},
    **{f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{0,18})?)\s*([A-Za-z]*)\s*")


def parsed(text: str, what: str) -> int:
    """Bytes that `text` says, for example `80GiB`; `what` is the name of the option.

    Raises:
        ConfigError: no such size.
    """
    found = _SIZE.fullmatch(text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ConfigError(
            f"{what} = '{text}' is no size: write a number and a unit, for example 80GiB or 24GB"
        )
    size = float(found[1]) * units[found[2].lower()]
    if not found[2] and not size.is_integer():
        raise ConfigError(
            f"{what} = '{text}' is no whole number of bytes, and never a share of the memory: write a unit, "
            "for example 8GiB"
        )
    return int(size)


def told(size: float) -> str:
    """Bytes for a person, in binary units: `16 GiB`, `1.3 MiB`, `512 bytes`."""
    names = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power, rest = 0, float(size)
    while abs(rest) >= 1024 and power < len(names) - 1:
        rest, power = rest / 1024, power + 1
    digits = f"{rest:.0f}" if rest >= 100 or rest == int(rest) else f"{rest:.3g}"
    return f"{digits} {names[power]}"
