"""The processes of a run, as their conductor sees them.

Role: starts, asks and ends them. Neighbours: `process` is what runs in them, `conductor` owns them.
Invariants: none outlives `end`; a worker imports what is installed and what the configuration names, never
what happens to lie in the working directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rollwright.clock import Clock
from rollwright.run.folder import RunFolder

ROLES = {"coupled": ("coupled",), "async": ("trainer", "rollouts")}
"""Mode → the roles of its processes."""

GRACE_SECONDS = 20.0
"""How long a process may take to stop cleanly before it is killed."""


@dataclass
class Worker:
    """One process of the run."""

    role: str
    process: subprocess.Popen[bytes]

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended other than it should."""
        return self.process.poll() not in (None, 0)


def launch(folder: RunFolder, role: str, incarnation: int) -> Worker:
    """Start a worker in a session of its own, so that Ctrl-C reaches it through us only."""
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        PYTHONUNBUFFERED="1",
        PYTHONHASHSEED="0",  # sets of text have one order in all processes and all parts of a run
    )
    place = [str(folder.path.absolute()), str(os.getpid()), str(incarnation)]
    with folder.output(role).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollwright.run.process", role, *place],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    return Worker(role, process)


def tell(workers: Sequence[Worker], number: signal.Signals) -> None:
    """Send a signal to those that run."""
    for worker in workers:
        if worker.alive:
            worker.process.send_signal(number)


def end(workers: Sequence[Worker], clock: Clock) -> None:
    """Have every worker end: asked first, killed after `GRACE_SECONDS`."""
    tell(workers, signal.SIGINT)
    deadline = clock.now() + GRACE_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - clock.now()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
