"""How many cores and how much memory a run may use here.

Role: read from the system. Neighbours: `preflight` refuses by it, `machine` tells it. Invariant: the limits
of a container count, not what lies outside of it; what cannot be found out is None.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores(root: Path = CGROUP) -> float:
    """Cores that this process may use: affinity, and the container's quota (control groups below `root`)."""
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(root / "cpu.max").partition(" ")
    return (
        min(float(ours), int(quota) / int(period)) if quota.isdigit() and period.strip().isdigit() else ours
    )


def memory(root: Path = CGROUP) -> tuple[int, int] | None:
    """Bytes of memory, in all and available, within the container's limit; None where that is unknown."""
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines() if ":" in line)
    try:
        total, free = (1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            return None
        return total, total
    limit, used = _read(root / "memory.max").strip(), _read(root / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total, free = min(total, int(limit)), min(free, max(0, int(limit) - int(used)))
    return total, free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
