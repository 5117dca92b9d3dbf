"""`rollwright serve` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-P", "-c", "from rollwright.cli.main import app; app()", "serve"]


def environment(**more: str) -> dict[str, str]:
    """Of this process, without what is ours, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROLLWRIGHT")}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}


@contextmanager
def serving(address: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A server that was started in the folder of `address`, where it writes it; dead at the end."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0", "--address", str(address)],
        cwd=address.parent,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for _ in range(600):
            if address.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        assert address.exists(), process.communicate()[0]
        yield process
    finally:
        process.kill()
        process.communicate()
