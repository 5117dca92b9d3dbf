"""Whose a remote sandbox is: labels at the vendor's, and whether their host process still lives.

Role: written with each machine, read by the reaper. Neighbours: `provider`. Invariants: a machine is
given up only where this very host can see that its process is gone; of other hosts nothing is concluded,
their machines end at the vendor's own timeout. Values are at most 63 letters, digits, `-`, `_`, `.`: what
Kubernetes takes.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

HOST, RUN, OWNER = "rollwright-host", "rollwright-run", "rollwright-owner"
_RUN = re.compile(r"([0-9a-f]{12})-(\d+)-(\d+)")


def _host() -> str:
    """This machine, in a form that tells nobody its name."""
    try:
        known = Path("/etc/machine-id").read_text().strip()
    except OSError:
        known = ""
    return hashlib.sha256(f"{known}/{socket.gethostname()}".encode()).hexdigest()[:16]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None where it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def run_label() -> str:
    """This process, among all that ever ran on this machine."""
    return f"{_boot()}-{os.getpid()}-{_started(os.getpid()) or 0}"


def labels(owner: str) -> dict[str, str]:
    """Of a machine made by this process for `owner`."""
    return {HOST: _host(), RUN: run_label(), OWNER: _fitting(owner)}


def ours() -> dict[str, str]:
    """What all machines made from this host have."""
    return {HOST: _host()}


def abandoned(found: Mapping[str, str]) -> bool:
    """Whether labels name a process of this host that is gone."""
    named = _RUN.fullmatch(found.get(RUN, ""))
    if found.get(HOST) != _host() or named is None:
        return False
    boot, pid, started = named.groups()
    return boot != _boot() or _started(int(pid)) != int(started)


def _fitting(owner: str) -> str:
    """`owner` as a label's value; one that had to be changed ends in a digest of what it was."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", owner).strip("-._")[:63].strip("-._")
    if plain and plain == owner:
        return plain
    digest = hashlib.sha256(owner.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{plain[:54].strip('-._') or 'owner'}-{digest}"
