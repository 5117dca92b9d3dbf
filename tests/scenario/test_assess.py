"""`rollwright assess` on real policies: something to learn, nothing left, no signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollwright.cli.main import app

TASKS = '''
"""Say the word again."""

import random

from rollwright.tasks.own import OwnTasks, Question

WORDS = ("ba", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "xa", "ze")


class Echo(OwnTasks):
    tools: tuple[str, ...] = ()
    right: float = 1.0
    """Share of the demonstrations that say the word; the others say another one."""

    def make(self, rng: random.Random) -> Question:
        one, other, last = rng.sample(WORDS, 3)
        said = one if rng.random() < self.right else other
        return Question(ask=f"{one} or {other}, {last}?", answer=one, says=said)
'''

CONFIG = """
[tasks]
type = "echo_tasks:Echo"
right = 0.5
limits = { max_tokens = 24, turn_tokens = 4, max_turns = 2 }
[model]
dim = 64
layers = 2
heads = 4
kv_heads = 2
ffn = 128
context = 32
rope_theta = 100.0
[warmstart]
steps = 200
batch = 16
[trainer]
sft_lr = 6e-3
[rollout]
concurrency = 32
[loop]
steps = 2
groups = 4
[queue]
capacity = 4
[evaluation]
tasks = 8
concurrency = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo" / "echo_tasks.py").write_text(TASKS)
    (tmp_path / "echo" / "echo.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)  # not where the module is
    return tmp_path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def assessed(folder: Path, code: int, *arguments: str) -> dict[str, Any]:
    done = command("assess", *arguments, "--tasks", "24", "--json")
    assert done.exit_code == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["unscorable"] == 0 and (found["tasks"], found["tries"]) == (24, 8)
    assert not list(folder.glob("runs*")), "a run folder was left behind"
    return found


def test_a_policy_that_is_right_now_and_then_has_something_to_learn(folder: Path) -> None:
    found = assessed(folder, 0, "echo/echo.toml")
    assert found["verdict"] == "go"
    assert 0.25 < found["pass_1"]["value"] < 0.75 and found["pass_k"]["value"] > 0.9
    assert found["pass_1"]["low"] < found["pass_1"]["value"] < found["pass_1"]["high"]
    assert found["shares"]["signal"]["value"] > 0.8
    assert found["turns"]["value"] == 1 and found["critic"]["pays"] is None
    assert 0.1 < found["heldout"]["value"] < 0.9 and found["warnings"] == []
    assert found["evidence"][0].startswith("rollouts ended: answered")
    assert found["step_seconds"]["value"] > 0
    assert found["run_seconds"]["value"] == pytest.approx(2 * found["step_seconds"]["value"])


def test_a_policy_that_is_always_right_has_no_room(folder: Path) -> None:
    found = assessed(folder, 1, "echo/echo.toml", "--set", "tasks.right=1.0")
    assert found["verdict"] == "no room" and found["pass_1"]["value"] > 0.97


def test_a_policy_that_is_always_wrong_has_no_signal(folder: Path) -> None:
    found = assessed(folder, 1, "echo/echo.toml", "--set", "tasks.right=0.0")
    assert found["verdict"] == "no signal" and found["shares"]["all wrong"]["value"] > 0.9
    assert "warm start" in "; ".join(found["reasons"])


def test_a_checkpoint_is_tried_on_other_tasks_and_its_run_stays_as_it_is(folder: Path) -> None:
    trained = command(
        "train", "echo/echo.toml", "--mode", "coupled", "--set", "loop.steps=0", "--set", "folder=kept"
    )
    assert trained.exit_code == 0, trained.output
    run = folder / "kept" / "run-1"
    before = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    found = assessed(folder, 0, "--run", str(run), "--set", "tasks.seed=5")
    assert found["verdict"] == "go"
    told = command("assess", "--run", str(run), "--tasks", "6", "--tries", "4")
    assert told.stdout.splitlines()[-1].startswith("go: ") and "pass@4" in told.stdout
    after = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
    assert {p: s for p, s in after.items() if p.suffix not in (".db-shm", ".db-wal")} == {
        p: s for p, s in before.items() if p.suffix not in (".db-shm", ".db-wal")
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "needs a TOML file"),
        (("--run", "nowhere"), "no run folder"),
        (("echo/echo.toml", "--set", "tasks.rihgt=1"), "did you mean"),
    ],
)
def test_wrong_arguments_are_one_line(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    done = command("assess", *arguments)
    assert done.exit_code == 2 and told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_ends_it_in_one_line_and_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    line = [sys.executable, "-m", "rollwright.cli.main", "assess", "echo/echo.toml"]
    process = subprocess.Popen(
        [*line, "--set", "warmstart.steps=100000"],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for told in process.stderr:
        if "warm start" in told:  # it is at work
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    said = [text for text in err.splitlines() if not text.startswith("warm start")]
    assert said == [
        f"rollwright: stopped by {number.name}: nothing is left behind; start again for an answer"
    ]
    assert process.returncode == 128 + number and out == "" and list(scratch.iterdir()) == []
