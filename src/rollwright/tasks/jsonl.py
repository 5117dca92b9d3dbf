"""Tasks from JSONL files: one `Task` record as JSON on each line.

Role: anybody's tasks without code. Neighbours: `config` names the files. Invariants: an unknown key is
refused with file and line; the two splits share neither an id nor a conversation; loading a file executes
nothing, and checks that hold Python are taken only where the configuration says so.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollwright.errors import ConfigError
from rollwright.tasks.base import Demonstration, Split
from rollwright.tasks.config import JsonlConfig
from rollwright.types import ReturnValue, Task

_decoder = msgspec.json.Decoder(Task)


class JsonlTasks:
    """The task set `jsonl`. It has no scripts: a warm start needs a policy that already knows the tool
    format."""

    def __init__(self, config: JsonlConfig) -> None:
        self.name = config.name
        self._splits: dict[Split, list[Task]] = {
            "train": read_tasks(config.train, trust_python=config.trust_python),
            "heldout": read_tasks(config.heldout, trust_python=config.trust_python),
        }
        ids = {task.id for task in self._splits["train"]}
        conversations = {task.messages for task in self._splits["train"]}
        for task in self._splits["heldout"]:
            if task.id in ids or task.messages in conversations:
                raise ConfigError(
                    f"{config.heldout}: task '{task.id}' is in {config.train} too; held-out tasks must be new"
                )

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0; `train` begins again when it runs out.

        Raises:
            ConfigError: `heldout` has no task of that number; counting one twice would make the interval
        too narrow.
        """
        tasks = self._splits[split]
        if split == "heldout" and number >= len(tasks):
            raise ConfigError(
                f"{self.name} holds {len(tasks)} held-out tasks, number {number} was asked for: set "
                f"evaluation.tasks = {len(tasks)} at most, or add tasks to the file of the split"
            )
        return tasks[number % len(tasks)]

    def demonstrate(self, task: Task, number: int) -> Demonstration | None:
        """None: a file holds no scripts."""
        return None

    def pieces(self) -> tuple[str, ...]:
        """None known: text from a file is spelled in bytes."""
        return ()


def read_tasks(path: Path, *, trust_python: bool = False) -> list[Task]:
    """The tasks of a file, in order; empty lines are skipped.

    Raises:
        ConfigError: no such file, no task in it, a line that is no task (unknown key, wrong type), a
            repeated id, or a check that holds Python without `trust_python`; the text names file and line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a file of tasks") from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}:{number}: not a task: {error}; mend that line (docs/tasks.md)"
            ) from error
        if task.id in tasks:
            raise ConfigError(f"{path}:{number}: the id '{task.id}' was used before; ids must differ")
        if not trust_python and any(isinstance(check, ReturnValue) for check in task.checks):
            raise ConfigError(
                f"{path}:{number}: the check 'return_value' holds Python; "
                "set trust_python = true for files you trust"
            )
        tasks[task.id] = task
    if not tasks:
        raise ConfigError(f"{path}: holds no task; expected one JSON record a line")
    return list(tasks.values())
