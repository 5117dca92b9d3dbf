"""A run folder as people see it: everything that views are computed from, read once.

Role: opens events, ledger, archive, configuration and tokenizer of a run. Neighbours: `report` draws what is
here. Invariants: nothing is written and no process started; what is missing (a run that was killed early, a
ledger that lived in memory) is None or empty and never an error; only a folder that is no run is one.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from rollwright.archive.base import Line
from rollwright.archive.reader import ArchiveReader, opened
from rollwright.buffer.base import Commit, Counts, Entry
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.config import RunConfig
from rollwright.errors import ConfigError, MissingExtra, SchemaError
from rollwright.events import Logged, read_events
from rollwright.model.hf_tokenizer import HfTokenizer
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.monitor.figures import Figures
from rollwright.run.folder import RunFolder
from rollwright.types import Lineage

State = Literal["finished", "running", "stopped"]


@dataclass(frozen=True)
class Ledger:
    """What the run's store says; `commits` oldest first."""

    entries: dict[str, Entry]
    counts: Counts
    commits: list[Commit]
    lineage: Lineage


@dataclass(frozen=True)
class RunView:
    """One run at one moment."""

    folder: RunFolder
    state: State
    config: RunConfig | None
    problem: str
    """Why `config` is None: a plug-in that is not installed, another schema."""
    events: list[Logged]
    lines: list[Line]
    """Every rollout that ended, in the order in which they were kept."""
    ledger: Ledger | None
    archive: ArchiveReader | None
    tokens: list[bytes]
    """What each token id stands for; empty where there is no tokenizer."""

    @property
    def figures(self) -> Figures:
        """The state as the events tell it."""
        figures = Figures(self.config.loop.steps if self.config else 0)
        for logged in self.events:
            figures.feed(logged)
        return figures


@contextmanager
def viewed(folder: RunFolder) -> Iterator[RunView]:
    """The run in `folder`; its archive is open inside the block.

    Raises:
        ConfigError: this is no run folder.
        StoreError, SchemaError: a database in it is damaged, or of another version.
    """
    if not folder.config.is_file():
        raise ConfigError(f"{folder.path} is no run folder: {folder.config.name} is missing")
    config, problem = None, ""
    try:
        config = folder.peek()
    except (ConfigError, ImportError, LookupError) as error:
        problem = " ".join(str(error).split())
    # The archive before the ledger: a rollout seen there has its line here.
    archive = opened(folder.rollouts) if folder.rollouts.is_file() else None
    try:
        yield RunView(
            folder=folder,
            state=_state(folder),
            config=config,
            problem=problem,
            events=read_events(folder.path),
            lines=list(archive.lines()) if archive else [],
            ledger=_ledger(folder),
            archive=archive,
            tokens=_tokens(folder),
        )
    finally:
        if archive:
            archive.close()


def _ledger(folder: RunFolder) -> Ledger | None:
    if not folder.store.is_file():
        return None
    store = SqliteStore(folder.store, 1, SystemClock(), readonly=True)
    try:
        entries = {entry.identity.rollout: entry for entry in store.entries()}
        return Ledger(entries, store.counts(), store.commits(), store.lineage())
    finally:
        store.close()


def _state(folder: RunFolder) -> State:
    if folder.finished.exists():
        return "finished"
    return "running" if _held(folder) else "stopped"


def _held(folder: RunFolder) -> bool:
    """Whether a living process other than this one conducts the run."""
    try:
        pid = int(folder.lock.read_text())
        os.kill(pid, 0)
    except (OSError, ValueError) as error:
        if not isinstance(error, PermissionError):
            return False
    if pid == os.getpid():
        return False
    with suppress(OSError), folder.lock.open("rb") as file:
        try:  # the number may be another process's by now; only who conducts a run holds the lock
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _tokens(folder: RunFolder) -> list[bytes]:
    """Of our own table, or of a Hugging Face tokenizer's."""
    try:
        text = folder.tokenizer.read_text(encoding="utf-8")
        try:
            return list(PieceTokenizer.from_json(text).vocabulary().pieces)
        except SchemaError:
            return list(HfTokenizer(text).vocabulary().pieces)
    except (OSError, UnicodeDecodeError, SchemaError, ConfigError, MissingExtra):
        return []


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Rollouts by group, seat and attempt: 0-g2/1.0, 0-g2/1.1, 0-g10/0.0."""
    return sorted(lines, key=lambda line: natural(line.rollout))


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key by which text is sorted with its numbers as numbers."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts]
