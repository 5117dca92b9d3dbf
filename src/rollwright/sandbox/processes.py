"""Processes by more than their number, and their end.

Role: tells a process from a later one of the same number. Neighbours: `owners` records and reaps by it,
`remains` ends what sits in a cgroup. Invariants: a process is signalled through a descriptor of it, after it
was looked at through the same number, so a number that is given away in between hits nobody else; every wait
has an end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

GONE_SECONDS = 5.0
"""How long a killed process may take to end before it is left to the kernel."""
_ROUNDS = 20
"""How often a session is looked through for processes that were forked meanwhile."""


@cache
def boot() -> str:
    """This boot of the machine; process numbers and start times mean nothing in another."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def numbers() -> str:
    """The numbering of processes that this one is in: its pid namespace."""
    return os.readlink("/proc/self/ns/pid")


def stat(pid: int) -> tuple[int, int] | None:
    """(session, start time in clock ticks since boot) of a process; None where there is none, or it is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[3]), int(fields[19]))


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 where there is none."""
    found = stat(pid)
    return found[1] if found else 0


@cache
def _host(pid: int) -> int:
    return started(pid)


def host() -> tuple[int, int]:
    """(number, start time) of this process."""
    pid = os.getpid()
    return pid, _host(pid)


def alive(pid: int) -> bool:
    """Whether a process of that number runs."""
    return stat(pid) is not None


def same(pid: int, start: int) -> bool:
    """Whether the process of that number is the one that started then."""
    found = stat(pid)
    return found is not None and found[1] == start


def every() -> Iterator[tuple[int, int, int]]:
    """(number, session, start time) of every process."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        found = stat(int(name))
        if found is not None:
            yield int(name), *found


def end(pids: Iterable[int], wanted: Callable[[int], bool]) -> int:
    """Kill those of `pids` that are `wanted`, which is asked once the number can't be given away any more,
    and wait until they are gone, `GONE_SECONDS` at most; how many were killed. Never this process."""
    killed, waiting = 0, select.poll()
    with contextlib.ExitStack() as held:
        left = 0
        for pid in set(pids) - {os.getpid(), 0}:
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:  # gone
                continue
            held.callback(os.close, descriptor)
            if not wanted(pid):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                killed, left = killed + 1, left + 1
                waiting.register(descriptor, select.POLLIN)
        while left:
            ended = waiting.poll(GONE_SECONDS * 1000)
            if not ended:
                break
            for descriptor, _ in ended:
                waiting.unregister(descriptor)
                left -= 1
    return killed


def end_sessions(leaders: dict[int, int]) -> int:
    """Kill every process of sessions, given as leader's number → its start time; how many. A leader that
    ended already may have left others in its session, which started after it; a leader of another start time
    is somebody else's."""
    mine = {pid: start for pid, start in leaders.items() if (found := stat(pid)) is None or found[1] == start}
    killed = 0
    for _ in range(_ROUNDS if mine else 0):

        def belongs(pid: int) -> bool:
            found = stat(pid)
            return found is not None and found[0] in mine and found[1] >= mine[found[0]]

        ended = end((pid for pid, session, _ in every() if session in mine), belongs)
        killed += ended
        if not ended:
            break
    return killed
