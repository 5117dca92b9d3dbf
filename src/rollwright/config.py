"""The one tree of configuration, and how files and flags become it.

Role: `RunConfig`. Neighbours: each package's `config.py` holds its branch; `run` builds from it.
Invariants: unknown keys are refused with the nearest name; the resolved tree is saved with the run; secrets
are never in it.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from rollwright.buffer.config import QueueConfig
from rollwright.engine.config import EmbeddedConfig
from rollwright.errors import ConfigError
from rollwright.model.config import ModelConfig
from rollwright.plugins import PartConfig, choose, import_from
from rollwright.plugins import load as load_part
from rollwright.rollout.config import RolloutConfig
from rollwright.trainer.config import TrainerConfig
from rollwright.values import advice, shown, takes

CHOICES = {
    "tasks": ("rollwright.tasks", "records"),
    "engine": ("rollwright.engines", "embedded"),
    "sandbox": ("rollwright.sandboxes", "auto"),
    "agent": ("rollwright.agents", "tool"),
    "reward": ("rollwright.rewards", "rules"),
    "algorithm": ("rollwright.algorithms", "grpo"),
}
"""Branches whose `type` names an implementation: (entry-point group, default)."""


class ScheduleConfig(PartConfig):
    """Learning rate over a phase: linear warm-up, then a cosine down to `final`."""

    warmup: int = Field(0, ge=0)
    """Updates over which the rate rises to the full one."""
    final: float = Field(1.0, ge=0, le=1)
    """Share of the full rate at the last update; 1 keeps it constant."""

    def rate(self, update: int, total: int) -> float:
        """Factor on the learning rate of `update` (1, 2, … `total`)."""
        if update <= self.warmup:
            return update / self.warmup
        done = (update - self.warmup) / max(1, total - self.warmup)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class WarmStartConfig(PartConfig):
    """The supervised phase that teaches a fresh policy the tool format, from scripted demonstrations."""

    steps: int = Field(300, ge=0)
    """Supervised updates; 0 starts RL from random weights."""
    batch: int = Field(64, ge=1)
    """Demonstrations per update, never the same twice."""
    schedule: ScheduleConfig = ScheduleConfig(warmup=20, final=0.1)
    """Of `trainer.sft_lr`."""


class LoopConfig(PartConfig):
    """How much is trained."""

    steps: int = Field(40, ge=0)
    """Optimiser steps of reinforcement learning; 0 stops after the warm start."""
    groups: int = Field(16, ge=1)
    """Groups per step; a step trains `groups` × `rollout.group_size` rollouts."""
    schedule: ScheduleConfig = ScheduleConfig(final=0.2)
    """Of `trainer.lr`."""
    start_wait: float = Field(3600.0, gt=0)
    """Longest wait in seconds of the rollout side for the first weights; the warm start comes before them."""
    group_wait: float = Field(300.0, gt=0)
    """Longest wait in seconds for the groups of one step before the run stops with an error."""
    report_seconds: float = Field(1.0, gt=0)
    """Seconds between two live figures of a process."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port on 127.0.0.1 where the process that makes the rollouts answers `GET /metrics` for Prometheus; 0 is
    none."""


class EvaluationConfig(PartConfig):
    """What is measured before and after, on held-out tasks."""

    tasks: int = Field(256, ge=1)
    """Held-out tasks, each tried once sampled (temperature 1) and once greedily."""
    concurrency: int = Field(128, ge=1)
    """Rollouts at once."""


class RunConfig(PartConfig):
    """Everything a run is made from."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the run; its folder is `folder`/`name`-N."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Weights and sampling hang on it; `tasks.seed` and `trainer.seed` are apart, so that seeds of a run
    can be compared on the same tasks."""
    mode: Literal["coupled", "async"] = "async"
    """`coupled`: one process, rollouts and training in turns. `async`: a rollout process and a trainer
    process, queue between."""
    imports: tuple[str, ...] = ()
    """Folders in which a `type = "module:Class"` is looked for, after what is installed; relative ones count
    from the TOML file. The folder of a TOML file that names such a type is added by itself."""
    tasks: SerializeAsAny[PartConfig] = Field(default_factory=lambda: choose(*_empty("tasks")))
    """Task set; `type` names it."""
    model: ModelConfig = ModelConfig()
    """Shape of the policy."""
    engine: SerializeAsAny[PartConfig] = Field(default_factory=lambda: choose(*_empty("engine")))
    """Inference engine; `type` names it."""
    sandbox: SerializeAsAny[PartConfig] = Field(default_factory=lambda: choose(*_empty("sandbox")))
    """Where actions run; `type` names the backend."""
    agent: SerializeAsAny[PartConfig] = Field(default_factory=lambda: choose(*_empty("agent")))
    """Who works on a task; `type` names it."""
    rollout: RolloutConfig = RolloutConfig()
    """Groups, deadlines, sampling."""
    reward: SerializeAsAny[PartConfig] = Field(default_factory=lambda: choose(*_empty("reward")))
    """How rollouts are scored; `type` names it."""
    queue: QueueConfig = QueueConfig()
    """Queue and ledger."""
    algorithm: SerializeAsAny[PartConfig] = Field(default_factory=lambda: choose(*_empty("algorithm")))
    """How groups become advantages; `type` names it."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimiser and loss."""
    warmstart: WarmStartConfig = WarmStartConfig()
    """Supervised start."""
    loop: LoopConfig = LoopConfig()
    """How much is trained."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Before and after."""

    @field_validator("imports")
    @classmethod
    def _import(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        import_from(folders)  # before the branches below are chosen
        return folders

    @field_validator(*CHOICES, mode="before")
    @classmethod
    def _choose(cls, value: Any, info: Any) -> PartConfig:
        group, default = CHOICES[info.field_name]
        return choose(group, value, default)

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.loop.steps and self.rollout.group_size < 2:
            raise ValueError(
                "rollout.group_size = 1: a group of one has no baseline and never a signal; give at least 2"
            )
        if self.queue.capacity < self.loop.groups:
            raise ValueError(
                f"queue.capacity = {self.queue.capacity} holds less than one step's "
                f"loop.groups = {self.loop.groups}; raise queue.capacity"
            )
        if (self.rollout.temperature, self.rollout.top_p) != (self.trainer.temperature, 1.0):
            raise ValueError(
                f"rollouts are sampled at temperature {self.rollout.temperature}, "
                f"top_p {self.rollout.top_p}, "
                f"the trainer expects temperature {self.trainer.temperature}, top_p 1: logprobs of two "
                "distributions do not compare; "
                "set rollout.temperature = trainer.temperature and rollout.top_p = 1"
            )
        if self.mode == "coupled" and isinstance(self.engine, EmbeddedConfig) and self.engine.device != "cpu":
            raise ValueError(
                f"engine.device = '{self.engine.device}': in mode = 'coupled' engine and trainer share their "
                "weights, and the trainer computes on the CPU; use mode = 'async' or engine.device = 'cpu'"
            )
        if self.mode == "async" and self.queue.type == "memory":
            raise ValueError(
                "queue.type = 'memory' cannot be shared by the two processes of mode = 'async'; "
                "use queue.type = 'sqlite' or mode = 'coupled'"
            )
        return self


def _empty(branch: str) -> tuple[str, dict[str, Any], str]:
    group, default = CHOICES[branch]
    return group, {}, default


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with `a.b=c` overrides.

    Raises:
        ConfigError: as `load`.
    """
    tree = config.model_dump()
    _overlay(tree, parsed(overrides))
    return resolved(tree, _flags(overrides))


def parsed(overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=c` overrides as one tree, the later ones on top.

    Raises:
        ConfigError: one is not of that form.
    """
    tree: dict[str, Any] = {}
    for text in overrides:
        _merge(tree, _parse_override(text))
    return tree


def _flags(overrides: Sequence[str]) -> str:
    return ", ".join(f"--set {text}" for text in overrides)


def load(paths: Sequence[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of one TOML file, overlaid with further ones, then with `a.b=c` overrides (values
    are TOML).

    Raises:
        ConfigError: one line: which file or flag, which key, what was given, what was expected.
    """
    tree: dict[str, Any] = {}
    folders: list[str] = []
    for path in paths:
        try:
            overlay = tomllib.loads(path.read_text())
        except FileNotFoundError as error:
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
            hint = f"did you mean {path.parent / near[0]}?" if near else "give the path of a TOML file"
            raise ConfigError(f"{path}: no such file; {hint}") from error
        except IsADirectoryError as error:
            raise ConfigError(f"{path}: is a folder; give a TOML file in it") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not text in UTF-8; give a TOML file") from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a TOML file") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}; mend that place") from error
        folders += _imports(overlay, path.parent)
        _overlay(tree, overlay)
    flags = parsed(overrides)
    folders += _imports(flags, Path())
    _overlay(tree, flags)
    if folders:
        tree["imports"] = list(dict.fromkeys(folders))
    sources = [*map(str, paths), *([_flags(overrides)] if overrides else [])]
    return resolved(tree, ", ".join(sources) or "defaults")


def _imports(overlay: dict[str, Any], folder: Path) -> list[str]:
    """Where an overlay in `folder` has modules looked for, absolute, so that every process of a run and its
    later evaluation find them from any working directory."""
    named = overlay.pop("imports", [])
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise ConfigError(f"imports = {named!r}: expected a list of folders")
    branches = [overlay[branch] for branch in CHOICES if isinstance(overlay.get(branch), dict)]
    own = [folder] if any(":" in str(branch.get("type", "")) for branch in branches) else []
    return [str(each.resolve()) for each in (*(folder / name for name in named), *own)]


def resolved(tree: dict[str, Any], source: str) -> RunConfig:
    """The configuration that `tree` holds (TOML's or JSON's types).

    Raises:
        ConfigError: one line that begins with `source`.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, tree)}") from error


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> None:
    """Lay `top` over `base`. Another `type` in a branch starts the branch anew: the keys of one
    implementation mean nothing to another."""
    for branch, (_, default) in CHOICES.items():
        below, above = base.get(branch), top.get(branch)
        if isinstance(below, dict) and isinstance(above, dict):
            was = below.get("type", default)
            if above.get("type", was) != was:
                base[branch] = {}
    _merge(base, top)


def _merge(base: dict[str, Any], top: dict[str, Any]) -> None:
    for key, value in top.items():
        below = base.setdefault(key, value)
        if isinstance(below, dict) and isinstance(value, dict):
            if value is not below:
                _merge(below, value)
        else:
            base[key] = value


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text}: expected KEY=VALUE, for example --set loop.steps=20")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        read = {"value": value.strip()}
    tree: Any = read["value"] if len(read) == 1 else value.strip()
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


def explain(error: ValidationError, tree: dict[str, Any]) -> str:
    """The first problem of a validation in one line: the key, what was given, what was expected, and what
    to do where that doesn't go without saying."""
    problems = error.errors()
    first = problems[0]
    loc, given = first["loc"], first["input"]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    where = ".".join(str(part) for part in loc) or "configuration"
    if first["type"] == "extra_forbidden":
        known = sorted(_fields_at(loc[:-1], tree))
        near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        parent = ".".join(str(part) for part in loc[:-1])
        text = f"unknown key '{loc[-1]}'" + (f" in [{parent}]" if parent else "") + f"; {hint}"
    elif first["type"] in ("value_error", "assertion_error"):
        text = f"{where}: {first['msg'].partition(', ')[2]}"
    elif field := _fields_at(loc[:-1], tree).get(str(loc[-1]) if loc else ""):
        if first["type"] == "missing":
            text = f"{where} is missing: give {takes(field)}"
        else:
            text = f"{where}: expected {takes(field)}, got {shown(given)}{advice(field, given)}"
    else:
        text = f"{where}: {shown(given)} cannot stand here; see docs/configuration.md for what can"
    return " ".join(text.split()) + more


def _fields_at(loc: tuple[Any, ...], tree: dict[str, Any]) -> dict[str, FieldInfo]:
    """The fields known at `loc`; in a chosen part those of the implementation that `tree` names."""
    model: type[BaseModel] = RunConfig
    for depth, part in enumerate(loc):
        if depth == 0 and part in CHOICES:
            group, default = CHOICES[part]
            given = tree.get(part, {})
            kind = given.get("type", default) if isinstance(given, dict) else given.type
            model = load_part(group, str(kind))
            continue
        field = model.model_fields.get(str(part))
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return {}
        model = inner[0]
    return model.model_fields
