"""Children of a process that may be hostile, and everything that comes of them.

Role: forks workers and ends them with every descendant. Neighbours: `zygote` (workers of all sandboxes) and
`native.inside` (workers of one) hold one each. Invariants: standard library only; a child never runs on in
its parent's code; the number of a child is used as long as it has not been waited for, and no longer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

_SWEEPS = 1000
"""Passes over the orphans at most: each pass kills a generation of what escaped a process group."""


class Forks:
    """The workers of this process, which adopts their orphans (`confine.adopt_orphans`, or being pid 1)."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc, self._pid = proc, os.getpid()
        self.live: set[int] = set()
        self.expected = 0
        """Children on their way that are not forked here: until they are in `live`, nothing is swept."""

    def fork(self, become: Callable[[], None]) -> int:
        """A child that does `become` and ends; its pid."""
        pid = os.fork()
        if pid == 0:
            try:
                become()
            except Exception:  # boundary: to this process's stderr, then the child is gone
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(70)  # never back into the parent's loop
        self.live.add(pid)
        return pid

    def end(self, pid: int) -> int:
        """Kill a worker and every descendant; its exit code, negative for a signal (-9 where it was still
        running). One that ended before gives 0."""
        if pid not in self.live:
            return 0  # the number may be somebody else's by now
        self.live.remove(pid)
        for kill in (os.killpg, os.kill):  # not yet a group where it was only just forked
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for _ in range(0 if self.expected else _SWEEPS):
            if not (orphans := self.orphans()):
                break
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        return status

    def bury(self) -> None:
        """Wait for orphans that have ended. Live workers are waited for by `end`."""
        for orphan in self.orphans():
            os.waitpid(orphan, os.WNOHANG)

    def orphans(self) -> set[int]:
        """Children that are no workers."""
        return self._children() - self.live

    def _children(self) -> set[int]:
        with contextlib.suppress(FileNotFoundError):
            return set(map(int, _text(f"{self._proc}/self/task/{self._pid}/children").split()))
        found = set()
        for name in filter(str.isdecimal, os.listdir(self._proc)):
            with contextlib.suppress(OSError):
                parent = _text(f"{self._proc}/{name}/stat").rpartition(")")[2].split()[1]
                if int(parent) == self._pid:
                    found.add(int(name))
        return found


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
