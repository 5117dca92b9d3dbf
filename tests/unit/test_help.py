"""`--help` answers at once: it never loads torch."""

import subprocess
import sys

import pytest

PROBE = """
import sys
from rollwright.cli.main import app
code = 0
try:
    app(sys.argv[1:])
except SystemExit as ended:
    code = ended.code or 0
print("torch" in sys.modules, code, file=sys.stderr)
"""
TORCH = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"


def ask(*arguments: str, before: str = "") -> tuple[str, list[str]]:
    """What the command prints, and [whether torch was loaded, exit code] from a fresh interpreter."""
    line = [sys.executable, "-c", before + PROBE, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help")])
def test_help_needs_no_torch(arguments: tuple[str, ...]) -> None:
    printed, state = ask(*arguments)
    assert "Usage" in printed
    assert state == ["False", "0"]


def test_the_probe_sees_torch_and_failure() -> None:
    assert ask("--help", before=TORCH)[1] == ["True", "0"]
    assert ask("no-such-command")[1] != ["False", "0"]
