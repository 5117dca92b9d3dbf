"""What a remote sandbox keeps, as far as it can be tried from inside.

Role: the `Guarantees` of remote backends. Neighbours: `provider` runs it at start. Invariants: nothing is
enforced that was not tried; what only the vendor can know (that its machines are apart from each other
and from its hosts) is best effort at most, however good the vendor's name is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.sandbox.base import Guarantee, Guarantees, Limits, Sandbox
from rollwright.sandbox.probe import PRIVILEGED, PROCESSES
from rollwright.types import CallStatus

_SECONDS = 30.0
_PUBLIC = (("1.1.1.1", 443), ("8.8.8.8", 53))
REACH = """
import socket
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return True
    except OSError:
        return False
[name for name in {targets!r} if reach(*name)]
"""
LARGE = """
with open('.large', 'wb') as file:
    file.seek({size})
    file.write(b'!')
"""
SEEN = """
import os
[path for path in {paths!r} if os.path.exists(path)]
"""


async def probe(
    sandbox: Sandbox, limits: Limits, targets: Sequence[tuple[str, int]], *, denies_network: bool
) -> tuple[Guarantees, list[str]]:
    """Try each from a fresh sandbox that nobody needs; the guarantees but `kill`, and what was reached.

    Args:
        targets: hosts and ports that answer this machine, so that failing to reach them means something.
        denies_network: whether the vendor was told to deny it; where nobody was, that nothing was reached is
            best effort.
    """
    tried = [*targets, *_PUBLIC]
    reached = await sandbox.run_code(REACH.format(targets=tried), timeout=_SECONDS)
    if reached.status is not CallStatus.OK:
        raise SandboxError(f"the probe could not run: {reached.status.value} {reached.stderr}")
    # a file of this host that is no file of any image
    seen = await sandbox.run_code(SEEN.format(paths=[str(Path(__file__))]), timeout=_SECONDS)
    forked = await sandbox.run_code(PROCESSES.format(limit=limits.processes + 8), timeout=_SECONDS)
    large = await sandbox.run_code(LARGE.format(size=limits.file_bytes), timeout=_SECONDS)
    memory = await sandbox.run_code(f"len(bytearray({limits.memory_bytes}))", timeout=_SECONDS)
    privileged = await sandbox.run_code(PRIVILEGED, timeout=_SECONDS)
    absent, best = Guarantee.ABSENT, Guarantee.BEST_EFFORT
    kept = Guarantee.ENFORCED if denies_network else best
    fits = forked.value is not None and forked.value.isdecimal() and int(forked.value) <= limits.processes
    refused = large.status is CallStatus.ERROR and "File too large" in large.stderr
    guarantees = Guarantees(
        fs=best if seen.value == "[]" else absent,
        net=kept if reached.value == "[]" else absent,
        pids=best if fits else absent,
        memory=best if memory.status is CallStatus.MEMORY else absent,
        disk=best if refused else absent,
        kill=absent,
        kernel_surface=best if privileged.value == "0" else absent,
    )
    return guarantees, [] if reached.value == "[]" else [reached.value or ""]
