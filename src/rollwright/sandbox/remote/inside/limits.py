"""How a worker process in a remote sandbox begins: limits first, then the loop that answers.

Role: the other end of `helper`'s workers. Neighbours: `worker` is the loop. Invariant: standard library only;
agent code runs under the limits from its first line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys

from rollwright.sandbox import worker


def adopt_orphans() -> None:
    """What a killed process leaves behind becomes a child of ours (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def work(descriptor: str, settings: str) -> str:
    """Be a worker: limits first, then serve until the helper closes its end."""
    adopt_orphans()
    limits = json.loads(settings)
    given = int(descriptor)
    if given != 3:
        os.dup2(given, 3, inheritable=False)
    os.set_inheritable(3, False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if os.geteuid() != 0:  # root is exempt; of another user the kernel counts all processes and threads
        wanted[resource.RLIMIT_NPROC] = _processes_of(os.geteuid()) + limits["processes"]
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # a second between SIGXCPU, which names the cause, and SIGKILL, which doesn't
        resource.setrlimit(kind, (value, value + (kind == resource.RLIMIT_CPU and hard != value)))
    del sys.argv[1:], sys.path[0]
    worker.serve(3, limits["kind"], limits["output_bytes"])
    return ""


def _processes_of(user: int) -> int:
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count
