"""One worker process of a run: `python -m rollwright.run.process ROLE FOLDER PARENT INCARNATION`.

Role: brackets a worker's life: parent watch, stop signal, events, exit code. Neighbours: `conductor` starts
it; `coupled`, `trainer_side` and `rollout_side` do the work. Invariants: it dies with its conductor; the
first SIGINT asks for a clean stop, which loses nothing; a foreseeable failure becomes a `Noted` event and
exit code 3, any other leaves its traceback in the process's own log.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rollwright import __version__
from rollwright.clock import SystemClock
from rollwright.errors import LeaseRevoked, RollwrightError
from rollwright.events import EventLog, Noted, RunStarted
from rollwright.run.folder import RunFolder
from rollwright.run.stop import Stop

FAILED = 3
"""Exit code of a worker whose error has been told in its events."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere the conductor's pipe does
    it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(FAILED)


def main(role: str, folder: RunFolder, parent: int, incarnation: int) -> int:
    """Run one role to its end; the exit code."""
    die_with_parent(parent)
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.ask())
    import torch  # every role computes with it; it takes seconds, so the signals are caught already

    torch.set_num_threads(1)
    versions = {
        "rollwright": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    events = EventLog(folder.events(role), SystemClock())
    events.emit(RunStarted(run=folder.id, process=role, incarnation=incarnation, versions=versions))
    try:
        asyncio.run(_work(role)(folder, events, stop))
    except LeaseRevoked:
        return 0  # asked to stop, and stopped
    except RollwrightError as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        events.emit(Noted(level="fatal", text=f"{role}: {error}" + (f" ({notes})" if notes else "")))
        return FAILED
    finally:
        events.close()
    return 0


def _work(role: str) -> Callable[[RunFolder, EventLog, Stop], Coroutine[Any, Any, None]]:
    from rollwright.run import coupled, rollout_side, trainer_side

    return {"coupled": coupled.work, "rollouts": rollout_side.work, "trainer": trainer_side.work}[role]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], RunFolder(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])))
