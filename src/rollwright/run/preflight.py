"""What is wrong with a configuration beyond what its fields can say, found before any process starts.

Role: contradictions between parts that show only once the parts exist. Neighbours: the conductor asks
first. Invariant: torch-free and quick; a run that would fail after minutes for these reasons fails here in
one line.
"""

from __future__ import annotations

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.plugins import buildable
from rollwright.tasks.base import TaskSet


def taskset(config: RunConfig) -> TaskSet:
    """The task set of `config`, checked against the model.

    Raises:
        ConfigError: rows that the limits of a task allow don't fit into the model's context.
    """
    tasks: TaskSet = buildable(config.tasks, "tasks").build()
    allowed = tasks.task("train", 0).limits.max_tokens
    if allowed > config.model.context:
        raise ConfigError(
            f"tasks '{tasks.name}' allow rows of {allowed} tokens, model.context = {config.model.context} "
            "holds fewer: raise model.context or lower the tasks' limits (tasks.limits.max_tokens)"
        )
    return tasks


def check(config: RunConfig) -> None:
    """Refuse a training run that would fail after minutes.

    Raises:
        ConfigError: rows that don't fit, too few held-out tasks, or a warm start without demonstrations.
    """
    tasks = taskset(config)
    tasks.task("heldout", config.evaluation.tasks - 1)
    if config.warmstart.steps and tasks.demonstrate(tasks.task("train", 0), 0) is None:
        raise ConfigError(
            f"tasks '{tasks.name}' have no scripted demonstrations, and warmstart.steps = "
            f"{config.warmstart.steps}: set warmstart.steps = 0"
        )
