"""The conductor: starts a run's processes, shows what they say, ends them together.

Role: `rollwright train`. Neighbours: `begin` prepares the folder, `workers` are what it starts, `monitor`
what it shows, `settle` what it does last. Invariants: no process of a run outlives it; the ledger is settled
and balanced when it returns; whatever it shows is read from the run folder.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from rollwright.clock import Clock, SystemClock
from rollwright.config import RunConfig
from rollwright.errors import MissingExtra, RollwrightError
from rollwright.events import Tail
from rollwright.monitor.figures import Figures
from rollwright.monitor.terminal import Terminal, before_after
from rollwright.run.begin import begin, held, reached, reopen
from rollwright.run.folder import RunFolder
from rollwright.run.settle import settle
from rollwright.run.workers import ROLES, Worker, end, launch, tell

POLL_SECONDS = 0.1
STOP_SECONDS = 120.0
"""How long the present piece of work may take after the first Ctrl-C; longer is not waited for."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end: Ctrl-C, a service manager's, and that of a terminal that is closed."""


class WorkerFailed(RollwrightError):
    """A process of the run ended with an error; the text is its first one."""

    def __init__(self, text: str, folder: RunFolder) -> None:
        super().__init__(text)
        self.folder = folder


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
    folder = begin(config, lambda text: console.print(text, soft_wrap=True, highlight=False))
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
        config = reopen(folder, overrides, clock, lambda text: console.print(text, soft_wrap=True))
        if config is None:
            text = f"{path} is finished; to train it further: --set loop.steps=N"
            console.print(text, highlight=False, soft_wrap=True)
            return Ended(0, folder)
        return Ended(supervise(folder, config, console, clock)[0], folder)


def _torch() -> None:
    if find_spec("torch") is None:
        raise MissingExtra("training", "torch")


def supervise(folder: RunFolder, config: RunConfig, console: Console, clock: Clock) -> tuple[int, Figures]:
    """Run the processes of `folder` to their end and show them; (exit code, what the run looked like).

    Raises:
        WorkerFailed: one of them failed, or left before its work was done.
    """
    figures, tail = Figures(config.loop.steps), Tail(folder.path)
    for logged in tail.read():  # of the parts before this one
        figures.feed(logged)
    incarnation = reached(folder, config, clock)[0]
    figures.part(incarnation)
    stopping = _Stopping(clock, console)
    previous = {number: signal.signal(number, stopping.ask) for number in STOPS}
    workers: list[Worker] = []
    try:
        terminal = Terminal(console, figures, f"{folder.id} · {config.mode}")
        try:
            workers += [launch(folder, role, incarnation) for role in ROLES[config.mode]]
            with terminal:
                fault = _watch(workers, tail, figures, terminal, stopping, config)
        finally:
            end(workers, clock)
            settle(folder, config, clock)
        if not stopping.asked:
            if fault:
                raise WorkerFailed(fault(folder, figures) + _how_on(folder, config, clock), folder)
            folder.finished.touch()
        terminal.summary(folder.example.read_text() if folder.example.is_file() else None)
        if stopping.asked:
            text = _where(figures, config) + _how_on(folder, config, clock)
            console.print(text, highlight=False, soft_wrap=True)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return (130 if stopping.asked else 0), figures


class _Stopping:
    """The wish to stop: the first signal asks the workers, the second kills them, and so does waiting too
    long after the first."""

    def __init__(self, clock: Clock, console: Console) -> None:
        self._clock, self._console = clock, console
        self.asked = self._told = 0
        self._since = 0.0

    def ask(self, *_: object) -> None:
        """A signal came."""
        self.asked += 1

    def act(self, workers: list[Worker]) -> None:
        """Do what was asked for since the last time."""
        now = self._clock.now()
        if self.asked and self._told < 2 and (self.asked > self._told or now - self._since > STOP_SECONDS):
            hard = self.asked > 1 or self._told > 0
            text = "stopping now" if hard else "ending the present piece of work; Ctrl-C again stops at once"
            self._told, self._since = (2 if hard else 1), now
            self._console.print(text)
            tell(workers, signal.SIGKILL if hard else signal.SIGINT)


@dataclass(frozen=True)
class _Fault:
    """What ended a run that nobody stopped; called, it says so in one line."""

    failed: Worker | None

    def __call__(self, folder: RunFolder, figures: Figures) -> str:
        if self.failed is None:
            return f"a process of the run was told to stop; the run ended at step {figures.step}"
        fatal = [note.text for note in figures.notes if note.level == "fatal"]
        if fatal:
            return fatal[0]
        log, code = folder.output(self.failed.role), self.failed.process.returncode
        if code < 0:
            return f"{self.failed.role} was killed by {signal.Signals(-code).name}"
        lines = log.read_text(errors="replace").strip().splitlines() or ["nothing in its log"]
        return f"{self.failed.role} ended with code {code}: {lines[-1]} (see {log})"


def _watch(
    workers: list[Worker],
    tail: Tail,
    figures: Figures,
    terminal: Terminal,
    stopping: _Stopping,
    config: RunConfig,
) -> _Fault | None:
    """Show the run until its workers have ended, one of them failed, or one left before its work was done;
    the fault, if there is one."""
    clock = stopping._clock
    fault: _Fault | None = None
    while fault is None and any(worker.alive for worker in workers):
        clock.pause(POLL_SECONDS)
        gone = {worker.role for worker in workers if not worker.alive}  # before its last events are read
        _show(tail, figures, terminal, clock)
        stopping.act(workers)
        failed = next((worker for worker in workers if worker.failed), None)
        if failed or (not stopping.asked and _left_early(gone, workers, figures, config)):
            fault = _Fault(failed)
    end(workers, clock)
    _show(tail, figures, terminal, clock)
    failed = next((worker for worker in workers if worker.failed), None)
    return fault or (_Fault(failed) if failed else None)


def _show(tail: Tail, figures: Figures, terminal: Terminal, clock: Clock) -> None:
    for logged in tail.read():
        figures.feed(logged)
    terminal.update(clock.now())


def _left_early(ended: set[str], workers: list[Worker], figures: Figures, config: RunConfig) -> bool:
    """Whether a worker ended cleanly while others wait for it: somebody asked it to stop, past us."""
    if len(ended) in (0, len(workers)):
        return False
    return not figures.measured if "rollouts" in ended else figures.step < config.loop.steps


def _where(figures: Figures, config: RunConfig) -> str:
    if figures.step == 0 and figures.warm_total:
        return f"stopped in the warm start, at {figures.warm} of {figures.warm_total}"
    return f"stopped at step {figures.step} of {config.loop.steps}"


def _how_on(folder: RunFolder, config: RunConfig, clock: Clock) -> str:
    """What a person can do with a run that ended before its end."""
    if config.queue.type == "memory":
        return ""
    step = reached(folder, config, clock)[1]
    measure = "" if step is None else f", `rollwright eval {folder.path}` measures"
    return f"; `rollwright train --resume {folder.path}` goes on{measure}"


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
