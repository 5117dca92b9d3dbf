"""The conductor: starts a run's processes, shows what they say, ends them together.

Role: `rollwright train`. Neighbours: `begin` prepares the folder, `process` is what it starts, `monitor` what
it shows.
Invariants: no process of a run outlives it; the ledger is settled and balanced when it returns; whatever it
shows is read from the run folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from rollwright.buffer.base import Commit, Drop, Store
from rollwright.clock import Clock, SystemClock
from rollwright.config import RunConfig
from rollwright.errors import MissingExtra, RollwrightError, StoreError
from rollwright.events import Tail
from rollwright.monitor.figures import Figures
from rollwright.monitor.terminal import Terminal, before_after
from rollwright.run.begin import begin, held, incarnation, reap, reopen
from rollwright.run.folder import RunFolder
from rollwright.types import Disposition, PolicyVersion

POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0
"""How long a process may take to stop cleanly before it is killed."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end: Ctrl-C, a service manager's, and that of a terminal that is closed."""

ROLES = {"coupled": ("coupled",), "async": ("trainer", "rollouts")}


class WorkerFailed(RollwrightError):
    """A process of the run ended with an error; the text is its first one."""


@dataclass
class Worker:
    """One process of the run."""

    role: str
    process: subprocess.Popen[bytes]


def launch(folder: RunFolder, role: str, incarnation: int) -> Worker:
    """Start a worker in a session of its own, so that Ctrl-C reaches it through us only."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", PYTHONUNBUFFERED="1")
    with folder.output(role).open("ab") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rollwright.run.process",
                role,
                str(folder.path.absolute()),
                str(os.getpid()),
                str(incarnation),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    return Worker(role, process)


@dataclass(frozen=True)
class Ended:
    """How a run, or this part of it, ended: the exit code (0, or 130 after Ctrl-C) and its folder."""

    code: int
    folder: RunFolder


def conduct(config: RunConfig, console: Console) -> Ended:
    """Train as `config` says.

    Raises:
        MissingExtra: torch is not installed.
        ConfigError: a contradiction between parts; nothing was started.
        WorkerFailed: a process failed; everything else was stopped.
    """
    _torch()
    folder = begin(config)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    with held(folder):
        return Ended(supervise(folder, config, console, SystemClock())[0], folder)


def resume(path: Path, overrides: list[str], console: Console) -> Ended:
    """Go on with the run in folder `path` from its last commit, changed as `overrides` say.

    Raises:
        as `conduct`; ConfigError: no run folder, one that is running, or a change that is too late.
    """
    _torch()
    folder, clock = RunFolder(path), SystemClock()
    with held(folder):
        config = reopen(folder, overrides, clock)
        if config is None:
            text = f"{path} is finished; to train it further: --set loop.steps=N"
            console.print(text, highlight=False, soft_wrap=True)
            return Ended(0, folder)
        return Ended(supervise(folder, config, console, clock)[0], folder)


def _torch() -> None:
    if find_spec("torch") is None:
        raise MissingExtra("training", "torch")


def supervise(folder: RunFolder, config: RunConfig, console: Console, clock: Clock) -> tuple[int, Figures]:
    """Run the processes of `folder` to their end and show them; (exit code, what the run looked like)."""
    figures, tail = Figures(config.loop.steps), Tail(folder.path)
    for logged in tail.read():  # of the parts before this one
        figures.feed(logged)
    incarnation = _incarnation(folder, config, clock)
    figures.part(incarnation)
    workers = [launch(folder, role, incarnation) for role in ROLES[config.mode]]
    interrupts = 0

    def interrupt(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1

    previous = {number: signal.signal(number, interrupt) for number in STOPS}
    told, failed, early = 0, None, False
    try:
        with Terminal(console, figures, f"{folder.id} · {config.mode}") as terminal:
            while any(worker.process.poll() is None for worker in workers):
                clock.pause(POLL_SECONDS)
                gone = _ended(workers)  # before its last events are read
                for logged in tail.read():
                    figures.feed(logged)
                terminal.update(clock.now())
                if interrupts > told:
                    told = interrupts
                    _interrupt(workers, hard=interrupts > 1, console=console)
                failed = _failed(workers)
                early = interrupts == 0 and _left_early(gone, workers, figures, config)
                if failed or early:
                    break
            failed = failed or _failed(workers)
            end(workers, clock)
            for logged in tail.read():
                figures.feed(logged)
            terminal.update(clock.now())
    finally:
        end(workers, clock)
        for number, handler in previous.items():
            signal.signal(number, handler)
        settle(folder, config, clock)
    if not interrupts:
        _raise_failure(folder, failed, figures)
        if early:
            text = f"a process of the run was told to stop; the run ended at step {figures.step}"
            raise WorkerFailed(text + _how_on(folder))
        folder.finished.touch()
    example = folder.example.read_text() if folder.example.is_file() else None
    terminal.summary(example)
    if interrupts:
        reached = f"stopped at step {figures.step} of {config.loop.steps}"
        if figures.step == 0 and figures.warm_total:
            reached = f"stopped in the warm start, at {figures.warm} of {figures.warm_total}"
        console.print(reached + _how_on(folder), highlight=False, soft_wrap=True)
    return (130 if interrupts else 0), figures


def _interrupt(workers: list[Worker], hard: bool, console: Console) -> None:
    console.print("stopping now" if hard else "ending the present piece of work; Ctrl-C again stops at once")
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGKILL if hard else signal.SIGINT)


def end(workers: list[Worker], clock: Clock) -> None:
    """Have every worker end: asked first, killed after `GRACE_SECONDS`."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGINT)
    deadline = clock.now() + GRACE_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - clock.now()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def settle(folder: RunFolder, config: RunConfig, clock: Clock) -> None:
    """Close the ledger of a run whose processes are gone: nothing is left running, and nothing queued if
    the run is finished (after a stop the queue waits for a resume).

    Raises:
        StoreError: started rollouts and dispositions don't agree.
    """
    if not folder.store.is_file():
        return
    reap(folder)
    store = config.queue.build(folder.store, clock, run=folder.id)
    try:
        store.reopen()
        last = store.last_commit()
        if last is not None and last.version.step >= config.loop.steps:
            _end_surplus(store, store.lineage().version(last.version.step), last.position)
        counts = store.counts()
        if not counts.balanced:
            raise StoreError(
                f"the ledger is not balanced: started {counts.started}, dispositions {counts.by}"
            )
    finally:
        store.close()


def _end_surplus(store: Store, version: PolicyVersion, position: int) -> None:
    """A finished run trains nothing any more: what still waits in the queue ends as surplus."""
    while queued := store.read(position, 100):
        ended = [
            Drop(
                rollout=member.rollout.identity.rollout,
                disposition=Disposition.SURPLUS,
                reason="run finished",
            )
            for each in queued
            for member in each.group.members
        ]
        position = queued[-1].position
        store.commit(
            Commit(version=version, position=position, trained=(), dropped=tuple(ended), checkpoint="")
        )


def _failed(workers: list[Worker]) -> Worker | None:
    """A worker that ended other than it should."""
    return next((worker for worker in workers if worker.process.poll() not in (None, 0)), None)


def _ended(workers: list[Worker]) -> set[str]:
    """Roles of the workers that have ended."""
    return {worker.role for worker in workers if worker.process.poll() is not None}


def _left_early(ended: set[str], workers: list[Worker], figures: Figures, config: RunConfig) -> bool:
    """Whether a worker ended cleanly while others wait for it: somebody asked it to stop, past us."""
    if len(ended) in (0, len(workers)):
        return False
    return not figures.measured if "rollouts" in ended else figures.step < config.loop.steps


def _raise_failure(folder: RunFolder, failed: Worker | None, figures: Figures) -> None:
    """The error that ended the run: as its worker told it, or the last line of the log of one that could
    not.

    Raises:
        WorkerFailed: there is one.
    """
    if failed is None:
        return
    fatal = [note.text for note in figures.notes if note.level == "fatal"]
    if fatal:
        raise WorkerFailed(fatal[0] + _how_on(folder))
    log, code = folder.output(failed.role), failed.process.returncode
    if code < 0:
        raise WorkerFailed(f"{failed.role} was killed by {signal.Signals(-code).name}{_how_on(folder)}")
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing in its log"]
    raise WorkerFailed(f"{failed.role} ended with code {code}: {lines[-1]} (see {log}){_how_on(folder)}")


def _how_on(folder: RunFolder) -> str:
    return f"; `rollwright train --resume {folder.path}` goes on, `rollwright eval {folder.path}` measures"


def _incarnation(folder: RunFolder, config: RunConfig, clock: Clock) -> int:
    store = config.queue.build(folder.store, clock, run=folder.id)
    try:
        return incarnation(store)
    finally:
        store.close()


def evaluate_run(path: Path, overrides: list[str], console: Console) -> int:
    """Evaluate the newest checkpoint of a run on held-out tasks, and show it.

    Raises:
        ConfigError: no run folder, or a wrong override.
    """
    from rollwright.run.evaluation import evaluate

    evaluations = evaluate(RunFolder(path), overrides, SystemClock())
    table = before_after(evaluations)
    if table is not None:
        console.print(table)
    return 0
