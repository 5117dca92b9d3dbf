"""What follows from a configuration before anything runs: how much is made, trained, held and stored.

Role: the figures below the tree that `rollwright config` prints, and the disk that preflight asks for.
Neighbours: `preflight`, `cli/configuration`. Invariants: no torch, and nothing is allocated; parameters and
bytes of weights are exact (float32), what rollouts leave behind is an estimate that errs upwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.config import RunConfig
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.kv.embedded import Pool, admissible, pool
from rollwright.events import Metrics
from rollwright.model.config import ModelConfig
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.tasks.base import TaskSet

FLOAT_BYTES = 4
WEIGHTS_KEPT, CHECKPOINTS_KEPT = 5, 3
"""Published weights and checkpoints that lie in a run folder at once: those kept, and the one being
written."""
ROLLOUT_BYTES, CALL_BYTES, TOKEN_BYTES = 3 * 2**10, 3 * 2**10, 32
"""Events, ledger, archive and audit of one rollout, of each call it may make and each token of its row, as
measured on small runs, rounded up."""
AGAIN = 2
"""Rollouts made for one that is trained: groups without signal are made anew with other tasks."""


@dataclass(frozen=True)
class Derived:
    """Figures of one configuration; bytes and counts, no units hidden."""

    tasks: str
    """Name of the task set."""
    vocabulary: int
    parameters: int
    weights_bytes: int
    checkpoint_bytes: int
    """Weights and the moments of both optimisers."""
    prompt_tokens: int
    """Of the first training task."""
    row_tokens: int
    """The longest row that its limits allow."""
    prompts_per_step: int
    rollouts_per_step: int
    updates_per_step: int
    tokens_per_step: int
    """At most: every row at its limit."""
    steps: int
    demonstrations: int
    evaluation_rollouts: int
    """Before and after, sampled and greedy."""
    kv_rows_bytes: int | None
    """Keys and values of the running requests, as many and as long as they may get; None where another engine
    says."""
    kv_cache_bytes: int | None
    """Of the prefix cache when it is full."""
    kv_host_bytes: int | None
    """Of the host tier when it is full."""
    states_bytes: int
    """Of weights and checkpoints that lie in the run folder at once."""
    records_bytes: int
    """What all rollouts leave in the run folder, an estimate that errs upwards."""
    warnings: tuple[str, ...] = ()
    """What is no contradiction but keeps a policy from learning, one line each; preflight looks for it."""

    @property
    def disk_bytes(self) -> int:
        """What the run folder may come to hold."""
        return self.states_bytes + self.records_bytes

    @property
    def rollouts(self) -> int:
        """Trained in all."""
        return self.rollouts_per_step * self.steps

    def tree(self) -> dict[str, int | str | tuple[str, ...] | None]:
        """All figures by name, for JSON."""
        totals = {
            "prompts": self.prompts_per_step * self.steps,
            "rollouts": self.rollouts,
            "samples": self.rollouts,
            "updates": self.updates_per_step * self.steps,
            "disk_bytes": self.disk_bytes,
        }
        return {**self.__dict__, **totals}

    def lines(self) -> Iterator[str]:
        """All figures for a person, one a line."""
        yield (
            f"tasks       {self.tasks}: prompt of {self.prompt_tokens:,} tokens (the first), rows of "
            f"{self.row_tokens:,} at most"
        )
        yield f"warm start  {self.demonstrations:,} demonstrations"
        yield (
            f"one step    {self.prompts_per_step:,} prompts, {self.rollouts_per_step:,} rollouts = samples, "
            f"updates {self.updates_per_step:,}, tokens {self.tokens_per_step:,} at most"
        )
        yield (
            f"in all      steps {self.steps:,}, prompts {self.prompts_per_step * self.steps:,}, "
            f"rollouts {self.rollouts:,}, updates {self.updates_per_step * self.steps:,}; "
            f"evaluation rollouts {self.evaluation_rollouts:,}"
        )
        yield (
            f"model       {self.parameters:,} parameters, vocabulary {self.vocabulary:,}; weights "
            f"{human(self.weights_bytes)}, checkpoint {human(self.checkpoint_bytes)}"
        )
        if self.kv_rows_bytes is not None and self.kv_cache_bytes is not None:
            yield (
                f"memory      keys and values at most: {human(self.kv_rows_bytes)} for running requests, "
                f"{human(self.kv_cache_bytes)} for cached prefixes"
            )
        yield (
            f"disk        {human(self.disk_bytes)} at most in the run folder: weights and checkpoints "
            f"{human(self.states_bytes)}, rollouts about {human(self.records_bytes)}"
        )
        for warning in self.warnings:
            yield f"warning     {warning}"


def derive(config: RunConfig, tasks: TaskSet) -> Derived:
    """The figures of `config` with its task set."""
    codec = PieceTokenizer(tasks.pieces(), CONTROL)
    task = tasks.task("train", 0)
    rollouts = config.loop.groups * config.rollout.group_size
    weights = FLOAT_BYTES * parameters(config.model, codec.size)
    moments = 2 * (bool(config.warmstart.steps) + bool(config.loop.steps))
    evaluations = 4 * config.evaluation.tasks
    stored = ROLLOUT_BYTES + task.limits.max_turns * CALL_BYTES + task.limits.max_tokens * TOKEN_BYTES
    published = WEIGHTS_KEPT if config.mode == "async" else 0
    kv = kv_pool(config, task.limits.max_tokens)
    return Derived(
        tasks=tasks.name,
        vocabulary=codec.size,
        parameters=weights // FLOAT_BYTES,
        weights_bytes=weights,
        checkpoint_bytes=weights * (1 + moments),
        prompt_tokens=len(PieceTemplate(codec).start(task.messages, ())),
        row_tokens=task.limits.max_tokens,
        prompts_per_step=config.loop.groups,
        rollouts_per_step=rollouts,
        updates_per_step=config.trainer.minibatches,
        tokens_per_step=rollouts * task.limits.max_tokens,
        steps=config.loop.steps,
        demonstrations=config.warmstart.steps * config.warmstart.batch,
        evaluation_rollouts=evaluations,
        kv_rows_bytes=kv.row_bytes if kv else None,
        kv_cache_bytes=kv.cache_bytes if kv else None,
        kv_host_bytes=kv.host_bytes if kv else None,
        states_bytes=weights * (published + (1 + moments) * CHECKPOINTS_KEPT),
        records_bytes=stored * (AGAIN * rollouts * config.loop.steps + evaluations),
    )


def parameters(model: ModelConfig, vocabulary: int) -> int:
    """Parameters of the decoder (`model.decoder.Decoder`); a tied head counts once."""
    head = model.dim // model.heads
    attention = model.dim * (model.heads + 2 * model.kv_heads) * head + model.dim * model.dim
    block = attention + 3 * model.dim * model.ffn + 2 * model.dim
    return model.layers * block + model.dim + vocabulary * model.dim * (1 if model.tied else 2)


def kv_values(model: ModelConfig) -> int:
    """Numbers in one token's keys and values (`model.base.Shape.kv_values`)."""
    return 2 * model.layers * model.kv_heads * (model.dim // model.heads)


def kv_pool(config: RunConfig, row_tokens: int) -> Pool | None:
    """The most that the embedded engine holds in a run whose rows have at most `row_tokens` tokens: as many
    requests as run at once, and a full prefix cache. None where another engine says."""
    if not isinstance(config.engine, EmbeddedConfig):
        return None
    requests = max(config.rollout.concurrency, config.evaluation.concurrency)
    tail = min(row_tokens, config.model.context)
    return pool(config.engine, kv_values(config.model), requests=requests, tail=tail)


def admitted(config: RunConfig, row_tokens: int) -> int | None:
    """Rollouts under way at once for which the embedded engine has room; None where another engine says."""
    if not isinstance(config.engine, EmbeddedConfig):
        return None
    return admissible(config.engine, min(row_tokens, config.model.context))


def planned(config: RunConfig, tasks: TaskSet) -> Metrics | None:
    """What keys and values may take at most, as the run tells it at its start; the report holds what was
    measured against it."""
    kv = kv_pool(config, tasks.task("train", 0).limits.max_tokens)
    if kv is None:
        return None
    values = {"engine/kv_planned": float(kv.bytes), "engine/kv_planned_rows": float(kv.row_bytes)}
    return Metrics(process="rollouts", values=values)


def human(size: float) -> str:
    """Bytes for a person: `1.3 GB`."""
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while size >= 1000 and power < len(units) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.0f} {units[power]}" if power == 0 or size >= 100 else f"{size:.1f} {units[power]}"
