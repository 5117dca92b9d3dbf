"""Who owns a sandbox's folder and processes, written down before they exist.

Role: the reaper's memory. Neighbours: `instance` writes, `local` reaps at start. Invariants: the record
lies outside the folder the agent can write; a process is only killed if it belongs to a recorded session and
started after it, so a reused number is safe; what a living host owns is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cache
from pathlib import Path

import msgspec

from rollwright.sandbox.files import remove_tree
from rollwright.wire import SCHEMA

_RECORD = "owners.jsonl"
_WORKERS = "workers"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who made the sandbox: a rollout, and the host process that serves it."""

    schema: int
    owner: str
    host: int
    host_started: int
    boot: str
    created: float


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[int, int] | None:
    """(session, start time in clock ticks since boot) of a process; None where there is none, or it is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[3]), int(fields[19]))


@cache
def _this_process(pid: int) -> tuple[int, int]:
    found = _stat(pid)
    return pid, found[1] if found else 0


def alive(pid: int) -> bool:
    """Whether a process of that number runs."""
    return _stat(pid) is not None


def record(folder: Path, owner: str, wall: float) -> None:
    """Write down who owns `folder`, before anything runs in it."""
    host, started = _this_process(os.getpid())
    entry = Owner(schema=SCHEMA, owner=owner, host=host, host_started=started, boot=_boot(), created=wall)
    with (folder / _RECORD).open("ab") as file:  # appended: replacing a file makes ext4 write to the disk
        file.write(msgspec.json.encode(entry) + b"\n")


def record_worker(folder: Path, pid: int) -> None:
    """Write down a worker's session."""
    found = _stat(pid)
    with (folder / _WORKERS).open("a") as file:
        file.write(f"{pid} {found[1] if found else 0}\n")


def reap(root: Path) -> int:
    """Remove what dead hosts left below `root`, processes first; returns how many sandboxes that were."""
    count = 0
    for folder in [entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()]:
        try:
            line = (folder / _RECORD).read_bytes().partition(b"\n")[0]  # every line names the same host
            owner = msgspec.json.decode(line, type=Owner)
        except (OSError, msgspec.MsgspecError):
            with contextlib.suppress(OSError):
                folder.rmdir()  # killed before it owned anything; what is not empty is not ours to delete
            continue
        found = _stat(owner.host) if owner.boot == _boot() else None
        if found is not None and found[1] == owner.host_started:
            continue
        if owner.boot == _boot():
            _kill_sessions(folder / _WORKERS)
        remove_tree(folder)
        count += 1
    return count


def _kill_sessions(path: Path) -> None:
    sessions: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                pid, started = map(int, line.split())
                leader = _stat(pid)
                if leader is None or leader[1] == started:  # else the number is somebody else's by now
                    sessions[pid] = started
    for name in filter(str.isdecimal, os.listdir("/proc")):
        found = _stat(int(name))
        if found is not None and found[0] in sessions and found[1] >= sessions[found[0]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)
