"""The process that workers of folder-based sandboxes are forked from: lean, single-threaded, standard
library.

Role: fork + walls ≈ 1 ms instead of a new interpreter per call. Neighbours: `launch` starts it, `folder`
talks to it over a SEQPACKET pair, one JSON message each way (a fork carries the worker's socket end by
SCM_RIGHTS); `worker` is what a child becomes. Invariants: it runs no agent code; every descendant of a worker
ends with it (one process group, and as subreaper it inherits what escaped the group); when the host's end
closes, it ends all workers and itself. Where it is a sandbox's `own` it is pid 1 there, behind walls that
`bubblewrap` put up: all ends with it, and it needs no walls of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
from typing import Any

from rollwright.sandbox import confine, lean, worker
from rollwright.sandbox.forks import Forks
from rollwright.sandbox.native.kernel import set_dumpable


class Zygote:
    """Forks workers and ends them."""

    def __init__(self, control: lean.Line, settings: dict[str, Any]) -> None:
        self._control = control
        self._pid = os.getpid()
        self._forks = Forks()
        self._walls = (
            confine.Walls(settings["readable"], settings["devices"]) if settings["confined"] else None
        )
        self._environment: dict[str, str] = settings["environment"]
        self._own: bool = settings["own"]
        if self._own:
            self._processes: int | None = 1  # none but this one are there besides the agent's
        else:
            self._processes = None if os.getuid() == 0 else self._running() + 64

    @staticmethod
    def _running() -> int:
        """Processes of this user: RLIMIT_NPROC counts them all."""
        count = 0
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                count += os.stat(f"/proc/{name}").st_uid == os.getuid()
        return count

    def serve(self) -> None:
        """Answer until the host is gone."""
        with contextlib.suppress(ConnectionError):  # it went with a request or an answer under way
            self._answer()
        if self._own:
            return  # the kernel ends what is in the namespace of a pid 1 that ended
        for pid in tuple(self._forks.live):
            self._forks.end(pid)

    def _answer(self) -> None:
        self._control.send({"n": 0, "pid": self._pid})
        while True:
            data, descriptors = self._control.receive()
            if not data:
                return
            request = lean.loads(data)
            if request["op"] == "fork":
                reply = {"pid": self._fork(request, descriptors[0])}
            elif request["op"] == "freeze":
                reply = {"done": self._freeze(request["pids"], request["frozen"])}
            else:
                reply = {"status": self._forks.end(request["pid"])}
            self._control.send({"n": request["n"], **reply})

    def _fork(self, request: dict[str, Any], descriptor: int) -> int:
        pid = self._forks.fork(lambda: self._become(request, descriptor))
        os.close(descriptor)
        return pid

    def _freeze(self, pids: list[int], frozen: bool) -> bool:
        """Stop or continue the process groups of these workers."""
        signalled = signal.SIGSTOP if frozen else signal.SIGCONT
        if self._own:  # every process but this one, also what is being forked
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signalled)
            return True
        for pid in self._forks.live.intersection(pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signalled)
        return True

    def _become(self, request: dict[str, Any], descriptor: int) -> None:
        """In the child: give everything up, then serve."""
        if not self._own:
            confine.die_with_parent(self._pid)
        elif request["kind"] == "interpreter":
            set_dumpable(True)  # else it could not look into itself
        confine.adopt_orphans()
        os.setsid()
        limits = request["limits"]
        folder = request["folder"]
        worker.inherit(self._environment | {"HOME": folder, "TMPDIR": folder})
        os.chdir(folder)
        null = os.open("/dev/null", os.O_RDWR)
        if self._walls is not None:
            self._walls.close_in(folder)
        # closes the control end, the paths of the walls, and whatever the host had open
        self._control.detach()
        line = worker.keep_only(null, descriptor)
        processes = None if self._processes is None else self._processes + limits["processes"]
        confine.limit_resources(
            limits["cpu_seconds"], limits["memory_bytes"], limits["file_bytes"], processes
        )
        worker.serve(line, request["kind"], limits["output_bytes"])


def main() -> None:
    """`python -I -S -c '…main()' SOURCE DESCRIPTOR SETTINGS`."""
    control, settings = lean.Line(int(sys.argv[2])), json.loads(sys.argv[3])
    del sys.path[0], sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to answer
    confine.adopt_orphans()
    if settings["own"]:
        set_dumpable(False)  # agents have the same user: they must not get at its log and at other workers
    zygote = Zygote(control, settings)
    gc.collect()
    gc.freeze()  # else the first collection in a child copies every page
    zygote.serve()
