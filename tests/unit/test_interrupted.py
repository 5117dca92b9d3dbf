"""Ctrl-C while modules are imported: 130, and one line at most."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import signal, sys

WANTED = sys.argv.pop(1)

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == WANTED:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Impatient())
from rollwright.cli.entry import entry
entry()
"""
LINE = ["plan", "kv", "llama-2-7b", "--card", "h100"]


def asked(module: str) -> subprocess.CompletedProcess[str]:
    """The command, interrupted as it imports `module`."""
    line = [sys.executable, "-c", PROBE, module, *LINE]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("typer", []),  # before there is a command
        ("rollwright.cli.plan", []),
        ("rollwright.engine.kv.cards", ["rollwright: interrupted"]),  # within it
    ],
)
def test_an_import_that_is_interrupted_is_no_traceback(module: str, says: list[str]) -> None:
    done = asked(module)
    assert (done.returncode, done.stderr.splitlines(), done.stdout) == (130, says, "")


def test_the_probe_lets_all_others_pass() -> None:
    done = asked("no.such.module")
    assert done.returncode == 0 and "sequences that fit" in done.stdout, done.stderr
