"""A small run as the command line starts it, for the scenario tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SMALL = """
mode = "async"
[tasks]
hops = 1
people = 4
habits.table = 0.4
limits.max_tokens = 128
[model]
dim = 128
layers = 2
kv_heads = 2
ffn = 256
context = 128
rope_theta = 100.0
[warmstart]
steps = 120
batch = 16
[trainer]
sft_lr = 3e-3
[rollout]
concurrency = 32
[loop]
steps = 6
groups = 4
[evaluation]
tasks = 24
"""
STEPS, GROUPS, SIZE = 6, 4, 8


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`rollwright train` of the small run in `folder`, with `arguments`."""
    (folder / "small.toml").write_text(SMALL)
    command = [sys.executable, "-P", "-m", "rollwright.cli.main", "train", "small.toml", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that work in this run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(folder) in line and int(entry.name) != os.getpid():
                found.append(line)
    return found


def resume(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rollwright train --resume` of the run that `start` began in `folder`."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "rollwright.cli.main",
        "train",
        "--resume",
        "runs/run-1",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=200, check=False)
