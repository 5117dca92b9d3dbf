"""The run folder: where everything of a run lies.

Role: names for its files. Neighbours: the workers write there, everything a person sees is computed from
it. Invariant: the resolved configuration is written before any process of the run starts; a resume that
changes it keeps the one before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from rollwright.config import CHOICES, RunConfig, resolved
from rollwright.errors import ConfigError
from rollwright.plugins import PartConfig
from rollwright.wire import SCHEMA


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @cached_property
    def id(self) -> str:
        """The run's id: the name that its folder got when it was made; it stays when the folder is moved."""
        try:
            return str(json.loads(self.config.read_text())["run"])
        except (OSError, ValueError, LookupError, TypeError):
            return self.path.resolve().name

    @property
    def config(self) -> Path:
        """Resolved configuration, JSON."""
        return self.path / "config.json"

    @property
    def store(self) -> Path:
        """Queue, ledger and commits (SQLite)."""
        return self.path / "run.db"

    @property
    def rollouts(self) -> Path:
        """Every rollout whole, and what was trained of it (SQLite)."""
        return self.path / "rollouts.db"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's table, JSON."""
        return self.path / "tokenizer.json"

    @property
    def lock(self) -> Path:
        """Held by the process that conducts the run."""
        return self.path / "run.lock"

    @property
    def finished(self) -> Path:
        """There once the last step is trained and measured."""
        return self.path / "finished"

    @property
    def report(self) -> Path:
        """The report for people, HTML."""
        return self.path / "report.html"

    @property
    def blobs(self) -> Path:
        """Weights, checkpoints and other payloads by digest."""
        return self.path / "blobs"

    @property
    def weights(self) -> Path:
        """Pointer to the newest published weights."""
        return self.path / "weights.json"

    @property
    def sandboxes(self) -> Path:
        """Working folders of live sandboxes, with their owners."""
        return self.path / "sandboxes"

    @property
    def example(self) -> Path:
        """One rollout of the last evaluation, as text, for people."""
        return self.path / "example.txt"

    def events(self, process: str) -> Path:
        """The event log of one process."""
        return self.path / f"events-{process}.jsonl"

    def audit(self, process: str) -> Path:
        """The audit log of one process."""
        return self.path / f"audit-{process}.jsonl"

    def output(self, process: str) -> Path:
        """What a process wrote to standard output and error."""
        return self.path / f"{process}.log"

    def save(self, config: RunConfig, incarnation: int) -> None:
        """Replace the configuration atomically; the one before stays as `config-before-N.json`.

        Raises:
            ConfigError: the folder cannot be written.
        """
        draft, kept = self.config.with_suffix(".draft"), self.path / f"config-before-{incarnation}.json"
        try:
            draft.write_text(_stored(config, self.id))
            os.link(self.config, kept)
            draft.replace(self.config)
        except OSError as error:
            raise ConfigError(f"{self.config}: cannot be replaced ({error.strerror})") from error

    def load(self) -> RunConfig:
        """The resolved configuration. A class that it names (`module:Class`) is imported, and so may run what
        lies beside it: for whoever is about to use it.

        Raises:
            ConfigError: this is no run folder, or of another schema.
        """
        return resolved(self._tree(), str(self.config))

    def peek(self) -> RunConfig:
        """The resolved configuration for people to read: a class that it names is not imported, its part
        holds what is stored.

        Raises:
            ConfigError: as `load`.
        """
        tree = self._tree()
        imports = tree.pop("imports", [])
        for branch in CHOICES:
            part = tree.get(branch)
            if isinstance(part, dict) and ":" in str(part.get("type", "")):
                tree[branch] = StoredPart.model_validate(part)
        return resolved(tree, str(self.config)).model_copy(update={"imports": tuple(imports)})

    def _tree(self) -> dict[str, Any]:
        if not self.config.is_file():
            raise ConfigError(
                f"{self.path} is no run folder: {self.config.name} is missing; give the folder of a "
                "run, such as runs/records-1"
            )
        try:
            stored = json.loads(self.config.read_text())
            if stored["schema"] != SCHEMA:
                raise ConfigError(
                    f"{self.config}: schema {stored['schema']}, this version reads {SCHEMA}: use the "
                    "version of rollwright that wrote it"
                )
            return dict(stored["config"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"{self.config}: not the configuration of a run ({what})") from error


class StoredPart(PartConfig):
    """A part of somebody's own as it is stored: a name and values."""

    model_config = ConfigDict(extra="allow")

    type: str


def create(config: RunConfig) -> RunFolder:
    """A new run folder under `config.folder`, named after the run, with the next free number.

    Raises:
        ConfigError: the folder cannot be written.
    """
    root = Path(config.folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = _numbered(root, config.name)
        folder.config.write_text(_stored(config, folder.path.name))
    except OSError as error:
        raise ConfigError(
            f"folder = {config.folder!r}: cannot write there ({error.strerror}); "
            "give another with --set folder=PATH"
        ) from error
    return folder


def newest(root: Path) -> RunFolder:
    """The run below `root` that was begun last.

    Raises:
        ConfigError: there is none.
    """
    found = [path.parent for path in root.glob("*/config.json")]
    if not found:
        raise ConfigError(f"no run folder below {root}: name one with --run")
    return RunFolder(max(found, key=lambda path: path.stat().st_ctime))


def _numbered(root: Path, name: str) -> RunFolder:
    """The next free number's folder, made; of two that start at once each gets its own."""
    numbers = (re.fullmatch(re.escape(name) + r"-(\d+)", entry.name) for entry in root.iterdir())
    number = max((int(found[1]) for found in numbers if found), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            (root / f"{name}-{number}").mkdir()
            return RunFolder(root / f"{name}-{number}")


def _stored(config: RunConfig, run: str) -> str:
    return json.dumps({"schema": SCHEMA, "run": run, "config": config.model_dump(mode="json")}, indent=1)
