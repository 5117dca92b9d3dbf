"""One line of an examination: what was looked at, what was found, what to do about it.

Role: what `machine` and `doctor` give. Neighbours: the command prints it, `--json` gives it to programs.
Invariant: whatever is not `OK` and can be mended says how.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass


class State(enum.Enum):
    """How it stands."""

    OK = "ok"
    LIMITED = "limited"
    """Works, with a restriction."""
    ABSENT = "absent"
    """Not there, and not needed to train."""
    BAD = "bad"
    """Training cannot start."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    value: str
    mend: str = ""

    def tree(self) -> dict[str, str]:
        """For JSON."""
        return {**asdict(self), "state": self.state.value}
