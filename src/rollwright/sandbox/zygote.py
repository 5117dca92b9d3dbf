"""The process all sandboxed workers are forked from: lean, single-threaded, standard library only.

Role: fork + walls ≈ 1 ms instead of a new interpreter per call. Neighbours: `channel` starts it and talks to
it over a SEQPACKET pair, one JSON message each way (a fork carries the worker's socket end by SCM_RIGHTS);
`worker` is what a child becomes. Invariants: it runs no agent code; every descendant of a worker ends with it
(one process group, and as subreaper it inherits what escaped the group); when the host's end closes, it ends
all workers and itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from rollwright.sandbox import confine, worker

_SWEEPS = 1000
"""Passes over the orphans at most: each pass kills a generation of what escaped a process group."""


class Zygote:
    """Forks workers and ends them."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._pid = os.getpid()
        self._walls = (
            confine.Walls(settings["readable"], settings["devices"]) if settings["confined"] else None
        )
        self._environment: dict[str, str] = settings["environment"]
        self._processes = None if os.getuid() == 0 else self._running() + 64
        self._live: set[int] = set()

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
        self._control.send(json.dumps({"n": 0, "pid": self._pid}).encode())
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
            if not data:
                break
            request = json.loads(data)
            if request["op"] == "fork":
                reply = {"pid": self._fork(request, descriptors[0])}
            else:
                reply = {"status": self._end(request["pid"])}
            self._control.send(json.dumps({"n": request["n"], **reply}).encode())
        for pid in tuple(self._live):
            self._end(pid)

    def _fork(self, request: dict[str, Any], descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self._become(request, descriptor)
            except Exception:  # boundary: to the zygote's stderr, then the child is gone
                traceback.print_exc()
            finally:
                os._exit(70)  # never back into the zygote's loop
        os.close(descriptor)
        self._live.add(pid)
        return pid

    def _become(self, request: dict[str, Any], descriptor: int) -> None:
        """In the child: give everything up, then serve."""
        confine.die_with_parent(self._pid)
        confine.adopt_orphans()
        os.setsid()
        os.environ.clear()
        os.environ.update(self._environment, HOME=request["folder"], TMPDIR=request["folder"])
        os.chdir(request["folder"])
        null = os.open("/dev/null", os.O_RDWR)
        limits = request["limits"]
        if self._walls is not None:
            self._walls.close_in(request["folder"])
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        if descriptor == 3:
            os.set_inheritable(3, False)
        else:
            os.dup2(descriptor, 3, inheritable=False)
        # closes the control end, the paths of the walls, and whatever the host had open
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        self._control.detach()
        processes = None if self._processes is None else self._processes + limits["processes"]
        confine.limit_resources(
            limits["cpu_seconds"], limits["memory_bytes"], limits["file_bytes"], processes
        )
        os.write(3, worker.READY)
        worker.serve(socket.socket(fileno=3), limits["output_bytes"])

    def _end(self, pid: int) -> int:
        """Kill a worker and every descendant; its exit code, negative for a signal (-9 where it was still
        running)."""
        if pid not in self._live:
            return 0  # ended before; the number may be somebody else's by now
        self._live.remove(pid)
        for kill in (os.killpg, os.kill):  # not yet a group where it was only just forked
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for _ in range(_SWEEPS):
            if not (orphans := self._children() - self._live):
                break
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        return status

    def _children(self) -> set[int]:
        with contextlib.suppress(FileNotFoundError):
            return set(map(int, Path(f"/proc/self/task/{self._pid}/children").read_text().split()))
        found = set()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self._pid:
                    found.add(int(name))
        return found


def main() -> None:
    """`python -I -S -c '…main()' SOURCE DESCRIPTOR SETTINGS`."""
    control, settings = socket.socket(fileno=int(sys.argv[2])), json.loads(sys.argv[3])
    del sys.path[0], sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to answer
    confine.adopt_orphans()
    zygote = Zygote(control, settings)
    gc.collect()
    gc.freeze()  # else the first collection in a child copies every page
    zygote.serve()
