"""What is wrong with a configuration beyond what its fields can say, found before any process starts.

Role: contradictions between parts that show only once the parts exist, and what this machine hasn't room
for. Neighbours: the conductor and `rollwright config` ask first. Invariant: torch-free, unless the engine is
to compute on an accelerator, and quick; nothing is written; a run that would fail after minutes for these
reasons fails here in one line.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollwright.agents.config import AgentConfig
from rollwright.agents.enforced import enforced
from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.config import RunConfig, override, parsed
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.kv.embedded import fitting
from rollwright.engine.serve.scrape import free
from rollwright.errors import ConfigError, ConstraintError, MissingExtra, SandboxUnavailable
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.plugins import buildable
from rollwright.run.capacity import memory
from rollwright.run.derived import Derived, derive, human, kv_values
from rollwright.run.rehearse import ON_PAPER, Faulty, on_paper
from rollwright.sandbox.base import SandboxProvider
from rollwright.sandbox.config import ProcessSandbox
from rollwright.tasks.base import TaskSet, Warns
from rollwright.tools.registry import ToolRegistry

MEASURED_BY = ("tasks", "agent", "engine", "evaluation", "reward", "sandbox", "seed", "imports")
"""Branches that an evaluation of a finished run hangs on; of `rollout` the keys below."""
MEASURED_BY_ROLLOUT = ("grace_seconds", "max_attempts", "reward_seconds", "sandbox_seconds", "success")


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


def check(config: RunConfig, at: Path | None = None) -> Derived:
    """Refuse a training run that would fail after minutes; what follows from the configuration. `at` is the
    folder of a run that goes on: what it holds already needs no room.

    Raises:
        ConfigError: rows that don't fit, too few held-out tasks, a warm start without demonstrations, scripts
            with calls that no tool takes or that the limits cut, a twin that nothing can be right on, calls
            that decoding cannot be held to, too few sandboxes, a folder that cannot be written, or too little
            room on its disk or in memory, a metrics port that is taken, or an accelerator that is not there.
        MissingExtra: calls are enforced and the extra `grammar` is missing.
        SandboxUnavailable: this kernel has no walls, and `unsafe` was not said.
        PluginError: a part or a tool that doesn't exist.
    """
    tasks = taskset(config)
    tasks.task("heldout", config.evaluation.tasks - 1)
    if config.warmstart.steps and tasks.demonstrate(tasks.task("train", 0), 0) is None:
        raise ConfigError(
            f"tasks '{tasks.name}' have no scripted demonstrations, and warmstart.steps = "
            f"{config.warmstart.steps}: set warmstart.steps = 0"
        )
    for branch in ("engine", "agent", "reward", "algorithm"):
        buildable(getattr(config, branch), branch)
    ToolRegistry.installed().specs(tasks.task("train", 0).tools)
    calls(config, tasks)
    derived = derive(config, tasks)
    if derived.prompt_tokens >= derived.row_tokens:
        raise ConfigError(
            f"tasks '{tasks.name}': the first prompt has {derived.prompt_tokens} tokens, rows may have "
            f"{derived.row_tokens}: nothing is left to say; raise the tasks' limits (max_tokens)"
        )
    paper = on_paper(config, tasks)
    if problems := paper.lines():
        raise Faulty(tasks.name, problems)
    told = tasks.warnings() if isinstance(tasks, Warns) else ()
    derived = replace(
        derived, warnings=(*told, *(f"tasks '{tasks.name}', {line}" for line in paper.warnings))
    )
    accelerator(config)
    sandboxes(config)
    free(config.loop.metrics_port)
    writable(at or Path(config.folder))
    fits_in_memory(config, derived)
    room(derived, at or Path(config.folder), held=_size(at) if at else 0)
    return derived


def calls(config: RunConfig, tasks: TaskSet) -> None:
    """Refuse to enforce calls where decoding cannot be held to them; a server says so of its own.

    Raises:
        ConfigError: a tool whose parameters cannot be enforced; says what of them.
        MissingExtra: the extra `grammar` is missing.
    """
    wanted = isinstance(config.agent, AgentConfig) and config.agent.calls == "enforced"
    if not wanted or not isinstance(config.engine, EmbeddedConfig):
        return
    if find_spec("llguidance") is None:
        raise MissingExtra("agent.calls = 'enforced'", "grammar")
    from rollwright.engine.grammar.guided import GuidedGrammars

    codec, registry = PieceTokenizer(tasks.pieces(), CONTROL), ToolRegistry.installed()
    grammars, stop = GuidedGrammars(codec.vocabulary()), PieceTemplate(codec).stop
    offered = (tasks.task("train", number).tools for number in range(ON_PAPER))
    for names in dict.fromkeys(offered):
        constraint = enforced(registry.specs(names))
        try:
            if constraint is not None:
                grammars.matcher(constraint, stop)
        except ConstraintError as error:
            raise ConfigError(
                f"agent.calls = 'enforced': decoding cannot be held to the tools {', '.join(names)} of the "
                f"tasks '{tasks.name}': {error}; mend their parameters, or set agent.calls = 'free'"
            ) from error


def accelerator(config: RunConfig) -> None:
    """Refuse an accelerator that this machine hasn't.

    Raises:
        ConfigError: as `device.present`.
    """
    elsewhere = isinstance(config.engine, EmbeddedConfig) and config.engine.device != "cpu"
    if elsewhere and find_spec("torch") is not None:  # without torch, training says which extra is missing
        from rollwright.run.device import present

        present(config.engine)


def sandboxes(config: RunConfig) -> None:
    """Refuse more rollouts at once than sandboxes may live, and a backend that cannot work here.

    Raises:
        ConfigError, SandboxUnavailable
    """
    part = config.sandbox
    if isinstance(part, ProcessSandbox) and not part.unsafe:
        from rollwright.sandbox.local import no_isolation

        raise SandboxUnavailable(no_isolation())
    provider: SandboxProvider = buildable(part, "sandbox").build(Path(config.folder))  # makes nothing yet
    wanted = max(config.rollout.concurrency, config.evaluation.concurrency)
    if provider.capacity < wanted:
        raise ConfigError(
            f"{wanted} rollouts at once (rollout.concurrency, evaluation.concurrency) need as many "
            f"sandboxes, only {provider.capacity} may live: raise sandbox.max_live"
        )


def writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be made; nothing stays there.

    Raises:
        ConfigError: it or what is above it is no folder, or may not be written.
    """
    place = nearest(folder)
    why = "" if place.is_dir() else f"{place} is a file"
    if not why:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"!")
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        raise ConfigError(
            f"folder = '{folder}': cannot write there ({why}); give another with --set folder=PATH"
        )


def room(derived: Derived, folder: Path, held: int = 0) -> None:
    """Refuse where the disk of `folder` has less free than the run may need; `held` bytes of it are there
    already.

    Raises:
        ConfigError: both figures and what to do.
    """
    free, needed = shutil.disk_usage(nearest(folder)).free, derived.disk_bytes - held
    if free < needed:
        raise ConfigError(
            f"folder = '{folder}': the run may need {human(needed)} there (weights and checkpoints "
            f"{human(derived.states_bytes)}, rollouts about {human(derived.records_bytes)}), {human(free)} "
            "are free: free space, give a folder on another disk with --set folder=PATH, or make less "
            "(model, loop.steps, loop.groups, evaluation.tasks)"
        )


def fits_in_memory(config: RunConfig, derived: Derived) -> None:
    """Refuse a model and a cache that this machine's memory cannot hold: weights, gradients, both optimisers'
    moments, the engine's copy, keys and values.

    Raises:
        ConfigError: both figures, and the nearest settings that fit.
    """
    kv = sum(each or 0 for each in (derived.kv_rows_bytes, derived.kv_cache_bytes, derived.kv_host_bytes))
    model, found = derived.checkpoint_bytes + 2 * derived.weights_bytes, memory()
    if found is None or model + kv <= found[0]:
        return
    raise ConfigError(
        f"the model may take {human(model)} of memory and its keys and values {human(kv)}, this machine has "
        f"{human(found[0])}: {_smaller(config, derived, found[0] - model)}"
    )


def _smaller(config: RunConfig, derived: Derived, budget: int) -> str:
    """What to set so that keys and values take at most `budget` bytes."""
    engine = config.engine
    if budget <= 0 or not isinstance(engine, EmbeddedConfig):
        return "take a smaller [model]"
    requests = max(config.rollout.concurrency, config.evaluation.concurrency)
    tail = min(derived.row_tokens, config.model.context)
    near = dict(fitting(engine, kv_values(config.model), budget, requests=requests, tail=tail))
    if near:
        return "set " + " or ".join(f"engine.{key} = {value}" for key, value in near.items())
    return "lower several of engine.max_batch, engine.row_tokens, engine.kv_tokens and engine.host_tokens"


def nearest(folder: Path) -> Path:
    """`folder`, or what exists of its way from the root.

    Raises:
        ConfigError: no file system can hold such a name.
    """
    if "\0" in str(folder):
        raise ConfigError(f"folder = {str(folder)!r}: a path cannot hold the character 0; give another")
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    return place


def evaluation(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration of an evaluation of the run that `config` made.

    Raises:
        ConfigError: as `config.override`; an override that cannot have an effect; or as `calls`.
        MissingExtra: as `calls`.
    """
    for key in _leaves(parsed(overrides)):
        branch, _, rest = key.partition(".")
        if branch == "rollout":
            idle = rest in type(config.rollout).model_fields and rest not in MEASURED_BY_ROLLOUT
        else:
            idle = branch in type(config).model_fields and branch not in MEASURED_BY
        if idle:
            raise ConfigError(
                f"--set {key}: cannot have an effect on an evaluation, which takes the policy as it was "
                f"trained: leave it out (what has one: {', '.join(MEASURED_BY)} and "
                f"{', '.join(f'rollout.{name}' for name in MEASURED_BY_ROLLOUT)})"
            )
    changed = override(config, overrides)
    calls(changed, taskset(changed))
    return changed


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key


def _size(folder: Path) -> int:
    """Bytes of the files below `folder`."""
    sizes = 0
    for path in folder.rglob("*"):
        try:
            sizes += path.lstat().st_size
        except OSError:  # it went meanwhile
            continue
    return sizes
