"""A whole async run from the command line, watched from outside: the ledger balances at every moment, both
processes end, and the run folder tells what happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import GROUPS, SIZE, STEPS, processes_of, start

from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.errors import RollwrightError
from rollwright.events import Evaluated, Metrics, RolloutEnded, StepEnded, WeightsPushed, read_events
from rollwright.guard.audit import verify
from rollwright.run.folder import RunFolder
from rollwright.types import Disposition
from rollwright.view.facts import further, measured
from rollwright.view.folder import viewed


def watch(process: subprocess.Popen[str], database: Path) -> int:
    """Look into the ledger until the run ends; returns how often."""
    looks = 0
    while process.poll() is None:
        if database.is_file():
            try:
                store = SqliteStore(database, 64, SystemClock())
            except RollwrightError:  # being made right now
                continue
            counts = store.counts()
            store.close()
            assert counts.balanced, counts
            looks += 1
        SystemClock().pause(0.02)
    return looks


@pytest.mark.timeout(240)
def test_the_ledger_balances_at_every_moment_and_all_is_told(tmp_path: Path) -> None:
    process = start(tmp_path)
    run = tmp_path / "runs" / "run-1"
    looks = watch(process, run / "run.db")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert looks > 50
    store = SqliteStore(run / "run.db", 64, SystemClock())
    counts, last = store.counts(), store.last_commit()
    store.close()
    assert counts.by[Disposition.TRAINED.value] == STEPS * GROUPS * SIZE
    assert counts.by[Disposition.EVALUATED.value] == 4 * 24
    assert not any(counts.by.get(d.value) for d in Disposition if d.open), counts
    assert last is not None and last.version.step == STEPS
    events = [logged.event for logged in read_events(run)]
    assert sum(isinstance(event, StepEnded) for event in events) == STEPS
    assert {(e.label, e.mode) for e in events if isinstance(e, Evaluated)} == {
        (label, mode) for label in ("before", "after") for mode in ("sampled", "greedy")
    }
    assert max(e.gap for e in events if isinstance(e, WeightsPushed)) <= 1e-4
    assert verify(run / "audit-rollouts.jsonl") is None
    assert "after" in output and "outcome" in output
    assert not processes_of(run)
    left = [path for path in (run / "sandboxes").glob("*/*") if path.is_dir()]
    assert not left, "no sandbox is left"
    check_eval(tmp_path, run)


def check_eval(folder: Path, run: Path) -> None:
    """`rollwright eval` asks the tasks it is told to, with the run's newest checkpoint, and leaves the run
    alone: also two at once, of other tasks with the same names."""
    example, before = (run / "example.txt").read_text(), shown(run)
    command = [sys.executable, "-P", "-m", "rollwright.cli.main", "eval", str(run)]
    sets = [("tasks.seed=7", "evaluation.tasks=4"), ("tasks.people=5", "evaluation.tasks=24")]
    started = [
        subprocess.Popen(
            [*command, *(part for each in pair for part in ("--set", each))],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for pair in sets
    ]
    said = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert {re.search(r"eval-\d", out).group() for out, _ in said} == {"eval-1", "eval-2"}  # type: ignore[union-attr]
    assert all(f"(step {STEPS})" in out for out, _ in said)
    asked = [e.task for x in read_events(run) if isinstance(e := x.event, RolloutEnded)]
    assert sum(task.startswith("records/7/heldout/") for task in asked) == 8
    assert (run / "example.txt").read_text() == example
    assert shown(run) == before, "what the run measured of itself is what it was"
    assert verify(run / "audit-eval-1.jsonl") is verify(run / "audit-eval-2.jsonl") is None
    with viewed(RunFolder(run)) as view:
        assert {e.label: e.trials for _, e in further(view) if e.mode == "greedy"}.keys() == {
            "eval-1",
            "eval-2",
        }
        assert view.archive is not None
        for name in ("0-after-sampled/0.0", "eval-1-sampled/0.0", "eval-2-sampled/0.0"):
            assert view.archive.kept(name) is not None, name


def shown(run: Path) -> tuple[object, object]:
    """Before, after and gain as the report has them, and the time that the run took."""
    with viewed(RunFolder(run)) as view:
        assert all(line.gain is not None and line.pairs > 10 for line in measured(view))
        return measured(view), view.figures.seconds


@pytest.mark.timeout(240)
def test_the_first_interrupt_stops_cleanly_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "--set", "loop.steps=200")
    run = tmp_path / "runs" / "run-1"
    clock = SystemClock()
    began = clock.now()
    while not any(isinstance(logged.event, StepEnded) for logged in read_events(run)):
        assert process.poll() is None and clock.now() - began < 150, process.communicate()[0]
        clock.pause(0.2)
    os.kill(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output
    store = SqliteStore(run / "run.db", 64, clock)
    counts, last = store.counts(), store.last_commit()
    store.close()
    assert counts.balanced and not counts.by.get("running"), counts
    assert last is not None and last.version.step >= 1
    assert not processes_of(run)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["async", "coupled"])
def test_an_interrupt_in_the_warm_start_ends_in_one_line(tmp_path: Path, mode: str) -> None:
    process = start(tmp_path, "--set", "warmstart.steps=5000", "--mode", mode)
    run = tmp_path / "runs" / "run-1"
    clock = SystemClock()
    while not any(
        isinstance(logged.event, Metrics) and "warmstart/step" in logged.event.values
        for logged in read_events(run)
    ):
        assert process.poll() is None, process.communicate()[0]
        clock.pause(0.2)
    os.kill(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output and "fatal" not in output
    (stopped,) = [line for line in output.splitlines() if "stopped in the warm start, at " in line]
    assert "--resume runs/run-1" in stopped
    assert not processes_of(run)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ended_from_outside_ends_the_run_with_one_line(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "--set", "warmstart.steps=2000")
    run = tmp_path / "runs" / "run-1"
    clock = SystemClock()
    while not (run / "events-rollouts.jsonl").exists():  # by then it listens to signals
        assert process.poll() is None, process.communicate()[0]
        clock.pause(0.1)
    victims = [line for line in processes_of(run) if "rollouts" in line]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if line == victims[0]:
                os.kill(int(entry.name), number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2, output
    told = "rollouts was killed by SIGKILL" if number == signal.SIGKILL else "told to stop"
    assert told in output.splitlines()[-1]
    assert "Traceback" not in output
    assert not processes_of(run)
