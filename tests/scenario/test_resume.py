"""A run that was stopped or killed goes on from its last commit: nothing is lost, or trained twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import GROUPS, SIZE, SMALL, STEPS, processes_of, resume, start

from rollwright.archive.sqlite import opened
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.events import Evaluated, Event, Metrics, Resumed, StepEnded, read_events
from rollwright.types import Disposition


def events(run: Path) -> list[Event]:
    return [logged.event for logged in read_events(run)]


def until(run: Path, process: subprocess.Popen[str], reached: Callable[[Event], bool]) -> None:
    """Wait until `reached` is true of an event of the run."""
    clock = SystemClock()
    began = clock.now()
    while not any(reached(event) for event in events(run)):
        assert process.poll() is None and clock.now() - began < 150, process.communicate()[0]
        clock.pause(0.1)


def pid_of(run: Path, role: str) -> int:
    """The process of the run that plays `role`."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if role in words and str(run) in words:
            return int(entry.name)
    raise AssertionError(f"no {role} in {processes_of(run)}")


def warm_steps(run: Path) -> list[float]:
    """The updates of the warm start that were told of, in order."""
    told = [event.values.get("warmstart/step") for event in events(run) if isinstance(event, Metrics)]
    return [step for step in told if step is not None]


def check_whole(run: Path, steps: int) -> None:
    """Each rollout has one end, each step was trained once, and everything trained can be shown."""
    store, archive = SqliteStore(run / "run.db", 64, SystemClock()), opened(run / "rollouts.db")
    counts, commits = store.counts(), store.commits()
    entries = store.entries()
    store.close()
    assert counts.balanced and not any(counts.by.get(d.value) for d in Disposition if d.open), counts
    trained = [rollout for commit in commits for rollout in commit.trained]
    assert len(trained) == len(set(trained)) == counts.by.get("trained", 0) == steps * GROUPS * SIZE
    assert sorted({commit.version.step for commit in commits}) == list(range(steps + 1))
    for entry in entries:
        if entry.disposition is Disposition.TRAINED:
            kept, samples = archive.kept(entry.identity.rollout), archive.samples(entry.identity.rollout)
            assert kept is not None and kept.scored.score.value is not None
            assert {sample.version for sample in samples} <= {entry.version}
    archive.close()


@pytest.mark.timeout(240)
def test_killed_resumed_finished_and_made_longer(tmp_path: Path) -> None:
    process, run = start(tmp_path), tmp_path / "runs" / "run-1"
    until(run, process, lambda event: isinstance(event, StepEnded) and event.step >= 2)
    second = resume(tmp_path)
    assert second.returncode == 2 and "is running (process" in second.stderr, second.stderr
    os.kill(pid_of(run, "trainer"), signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2, output
    last = output.splitlines()[-1]
    assert "trainer was killed by SIGKILL" in last and "--resume runs/run-1" in last
    assert not processes_of(run)

    wrong = resume(tmp_path, "--set", "model.dim=64")
    assert wrong.returncode == 2 and "model.dim" in wrong.stderr and "new run" in wrong.stderr
    done = resume(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_whole(run, STEPS)
    seen = events(run)
    resumed = [event for event in seen if isinstance(event, Resumed)]
    assert len(resumed) == 1 and resumed[0].step >= 2
    labels = [(e.label, e.mode) for e in seen if isinstance(e, Evaluated)]
    assert sorted(labels) == [
        (label, mode) for label in ("after", "before") for mode in ("greedy", "sampled")
    ]

    again = resume(tmp_path)
    assert again.returncode == 0 and "finished" in again.stdout
    longer = resume(tmp_path, "--set", f"loop.steps={STEPS + 1}")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    check_whole(run, STEPS + 1)
    assert (run / "config-before-2.json").is_file()
    assert not processes_of(run)


@pytest.mark.timeout(240)
def test_a_warm_start_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    process, run = start(tmp_path, "--set", "loop.steps=1"), tmp_path / "runs" / "run-1"
    until(run, process, lambda event: isinstance(event, Metrics) and "warmstart/step" in event.values)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert warm_steps(run)[-1] < 120
    assert resume(tmp_path).returncode == 0
    steps = warm_steps(run)
    assert steps[-1] == 120
    assert steps == sorted(set(steps)), "no update was made twice"
    check_whole(run, 1)


@pytest.mark.timeout(240)
def test_a_run_without_steps_ends_as_finished(tmp_path: Path) -> None:
    short = ("warmstart.steps=3", "loop.steps=0", "evaluation.tasks=2")
    process = start(tmp_path, *(word for text in short for word in ("--set", text)))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    run = tmp_path / "runs" / "run-1"
    assert (run / "finished").exists() and (run / "report.html").is_file()
    labels = [(e.label, e.mode) for e in events(run) if isinstance(e, Evaluated)]
    assert len(labels) == len(set(labels)) == 4
    check_whole(run, 0)


@pytest.mark.timeout(240)
def test_a_second_interrupt_stops_at_once_and_loses_no_commit(tmp_path: Path) -> None:
    process, run = start(tmp_path, "--set", "loop.steps=200"), tmp_path / "runs" / "run-1"
    until(run, process, lambda event: isinstance(event, StepEnded))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    SystemClock().pause(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output and not processes_of(run)
    store = SqliteStore(run / "run.db", 64, SystemClock())
    last, counts = store.last_commit(), store.counts()
    store.close()
    assert last is not None and last.version.step >= 1
    assert counts.balanced and not counts.by.get("running")
    told = max(event.step for event in events(run) if isinstance(event, StepEnded))
    assert last.version.step >= told


@pytest.mark.timeout(240)
def test_two_coupled_runs_of_one_seed_give_the_same_curve(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    curves = []
    for number in (1, 2):
        command = [sys.executable, "-m", "rollwright.cli.main", "train", "small.toml", "--mode", "coupled"]
        done = subprocess.run(
            [*command, "--set", "loop.steps=3"], cwd=tmp_path, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        seen = events(tmp_path / "runs" / f"run-{number}")
        curves.append(
            [
                {name: event.metrics[f"train/{name}"] for name in ("reward", "loss", "grad_norm", "entropy")}
                for event in seen
                if isinstance(event, StepEnded)
            ]
            + [(e.label, e.mode, e.successes, e.metrics) for e in seen if isinstance(e, Evaluated)]
        )
    assert len(curves[0]) == 3 + 4
    assert curves[0] == curves[1]
