"""How a run begins, and how it is taken up again.

Role: makes a run folder ready before any process works in it. Neighbours: the conductor calls it, the
workers find what it wrote. Invariants: one conductor at a time holds a folder; a resume opens a new
incarnation before any worker starts, so that all of them agree on it; what a killed run left open has ended
in the ledger by then, and no sandbox of it lives.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollwright.agents.template import CONTROL
from rollwright.archive.sqlite import SqliteArchive
from rollwright.blobs.folder import FolderBlobs
from rollwright.buffer.base import Store
from rollwright.clock import Clock
from rollwright.config import RunConfig, override
from rollwright.errors import ConfigError, DamagedStore, SchemaError
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.run.folder import RunFolder, create
from rollwright.run.preflight import check, taskset
from rollwright.sandbox import owners

CHANGEABLE = ("loop", "evaluation")
"""Branches that a resume may change: nothing that was made so far hangs on them."""


def begin(config: RunConfig, say: Callable[[str], None] = lambda text: None) -> RunFolder:
    """A new run folder for `config`, ready for its processes. `say` is told what is odd about it.

    Raises:
        ConfigError: a contradiction between parts, or a folder that cannot be written.
        SandboxUnavailable: the list of owners of sandboxes cannot be read.
    """
    for warning in check(config).warnings:
        say(f"warning: {warning}")
    owners.reap_all()
    folder = create(config)
    folder.tokenizer.write_text(PieceTokenizer(taskset(config).pieces(), CONTROL).to_json())
    SqliteArchive(folder.rollouts).close()
    return folder


def reopen(
    folder: RunFolder, overrides: Sequence[str], clock: Clock, say: Callable[[str], None]
) -> RunConfig | None:
    """Make the run in `folder` ready to go on from its last commit, as `overrides` change it; its
    configuration now. None where it is finished and has nothing left to do. `say` is told what had to be
    mended.

    Raises:
        ConfigError: no run folder, an override of what may not change any more, or a run that kept nothing
            to go on from.
        StoreError, SchemaError: what it would go on from is damaged; nothing was changed.
    """
    before = folder.load()
    config = _changed(before, overrides)
    check(config, at=folder.path)
    if config.queue.type == "memory":
        raise ConfigError(f"{folder.path} has queue.type = 'memory', which keeps nothing to go on from")
    if not folder.store.is_file() and any(folder.path.glob("events-*.jsonl")):
        raise ConfigError(f"{folder.store} is missing: restore it from a copy, or start a new run")
    reap(folder)
    store = config.queue.build(folder.store, clock, run=folder.id)
    try:
        last = store.last_commit()
        step = 0 if last is None else last.version.step
        if step > config.loop.steps:
            raise ConfigError(
                f"loop.steps = {config.loop.steps}: the run is at step {step} already; give a larger number"
            )
        if step >= config.loop.steps and folder.finished.exists() and config == before:
            return None
        if last is not None:
            FolderBlobs(folder.blobs / "checkpoints").get(last.checkpoint)  # damaged: told before anything
        _mend(folder, config, clock, say)
        store.reopen()
        number = len(store.fork(step).forks) - 1
        folder.finished.unlink(missing_ok=True)
    finally:
        store.close()
    if config != before:
        folder.save(config, number)
    return config


def _changed(before: RunConfig, overrides: Sequence[str]) -> RunConfig:
    for text in overrides:
        if text.partition("=")[0].strip().partition(".")[0] not in CHANGEABLE:
            raise ConfigError(
                f"--set {text}: a run that goes on keeps what it was made from; only "
                f"{' and '.join(f'{name}.*' for name in CHANGEABLE)} may change: start a new run for the rest"
            )
    return override(before, overrides)


def _mend(folder: RunFolder, config: RunConfig, clock: Clock, say: Callable[[str], None]) -> None:
    """What can be made anew is: the tokenizer, which follows from the tasks, and the archive, without which
    a run goes on."""
    try:
        PieceTokenizer.from_json(folder.tokenizer.read_text())
    except (OSError, UnicodeDecodeError, SchemaError) as error:
        folder.tokenizer.write_text(PieceTokenizer(taskset(config).pieces(), CONTROL).to_json())
        say(f"{folder.tokenizer} was made anew from the tasks: {_line(error)}")
    try:
        SqliteArchive(folder.rollouts).close()
    except DamagedStore as error:
        aside = folder.rollouts.with_name(f"rollouts-damaged-{int(clock.wall())}.db")
        folder.rollouts.rename(aside)
        for log in (f"{folder.rollouts}-wal", f"{folder.rollouts}-shm"):
            Path(log).unlink(missing_ok=True)
        SqliteArchive(folder.rollouts).close()
        say(f"the archive of earlier rollouts is damaged and lies in {aside} now: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def reached(folder: RunFolder, config: RunConfig, clock: Clock) -> tuple[int, int | None]:
    """(incarnation, committed step) of a run; None where nothing was committed."""
    store = config.queue.build(folder.store, clock, run=folder.id)
    try:
        last = store.last_commit()
        return incarnation(store), None if last is None else last.version.step
    finally:
        store.close()


def reap(folder: RunFolder) -> None:
    """End every sandbox whose owner is gone: of any run of this user on this machine, and of this one
    wherever it ran."""
    owners.reap_all()
    for sandboxes in folder.sandboxes.glob("*/"):
        owners.reap(sandboxes)


def incarnation(store: Store) -> int:
    """The number of times that the run was taken up again."""
    return len(store.lineage().forks) - 1


@contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Hold the folder against a second conductor; the kernel lets go of it when this process ends.

    Raises:
        ConfigError: another process works in it.
    """
    if not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is no run folder: there is none of that name")
    try:
        file = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder.path} cannot be written ({error.strerror})") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            by = os.read(file, 32).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"{folder.path} is running (process {by}): wait for it, or end it with Ctrl-C"
            ) from error
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)
