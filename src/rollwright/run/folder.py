"""The run folder: where everything of a run lies.

Role: names for its files. Neighbours: the workers write there, everything a person sees is computed from
it. Invariant: the resolved configuration is written before any process of the run starts, and never
changes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.wire import SCHEMA


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id: the folder's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """Resolved configuration, JSON."""
        return self.path / "config.json"

    @property
    def store(self) -> Path:
        """Queue, ledger and commits (SQLite)."""
        return self.path / "run.db"

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

    def load(self) -> RunConfig:
        """The resolved configuration.

        Raises:
            ConfigError: this is no run folder, or of another schema.
        """
        if not self.config.is_file():
            raise ConfigError(f"{self.path} is no run folder: {self.config.name} is missing")
        try:
            stored = json.loads(self.config.read_text())
            if stored["schema"] != SCHEMA:
                raise ConfigError(f"{self.config}: schema {stored['schema']}, this version reads {SCHEMA}")
            return RunConfig.model_validate(stored["config"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"{self.config}: not the configuration of a run ({what})") from error


def create(config: RunConfig) -> RunFolder:
    """A new run folder under `config.folder`, named after the run, with the next free number.

    Raises:
        ConfigError: the folder cannot be written.
    """
    root = Path(config.folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        taken = [
            int(match[1])
            for entry in root.iterdir()
            if (match := re.fullmatch(re.escape(config.name) + r"-(\d+)", entry.name))
        ]
        folder = RunFolder(root / f"{config.name}-{max(taken, default=0) + 1}")
        folder.path.mkdir()
        stored = {"schema": SCHEMA, "config": config.model_dump(mode="json")}
        folder.config.write_text(json.dumps(stored, indent=1))
    except OSError as error:
        raise ConfigError(
            f"folder = {config.folder!r}: cannot write there ({error.strerror}); "
            "give another with --set folder=PATH"
        ) from error
    return folder
