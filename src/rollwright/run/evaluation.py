"""Evaluation of a finished run's newest checkpoint.

Role: `rollwright eval`. Neighbours: the rollout side does the work. Invariants: the run folder keeps its
queue and ledger as they are; the evaluation's own rollouts are counted in a ledger in memory. Each evaluation
has a name that no other has (`eval-3`), and with it its own event and audit log and its own rollout ids, so
that several may go on at once and none replaces what another measured.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

from rollwright.blobs.folder import FolderBlobs
from rollwright.buffer.base import Commit
from rollwright.buffer.memory import MemoryStore
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import Clock
from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.events import Evaluated, EventLog, RunStarted
from rollwright.pool.base import WorkKind
from rollwright.run.folder import RunFolder
from rollwright.run.leases import leased
from rollwright.run.preflight import evaluation, taskset
from rollwright.run.stop import Stop


def evaluate(folder: RunFolder, overrides: list[str], clock: Clock) -> list[Evaluated]:
    """Success, sampled and greedy, of the newest committed checkpoint.

    Raises:
        ConfigError: no run folder, nothing committed yet, a folder that cannot be written, or a wrong
            override.
        StoreError, SchemaError: what the run left is damaged, or of another version.
    """
    run = folder.load()
    config = evaluation(run, overrides)
    commit, state = newest(folder, run, clock)
    name = _named(folder)
    return asyncio.run(_evaluate(folder, config, commit, state, name, clock))


def _named(folder: RunFolder) -> str:
    """The next free name, taken by making its event log; of two that start at once each gets its own.

    Raises:
        ConfigError: the folder cannot be written.
    """
    found = (re.fullmatch(r"events-eval-(\d+)\.jsonl", path.name) for path in folder.path.iterdir())
    number = max((int(each[1]) for each in found if each), default=0)
    while True:
        number += 1
        try:
            folder.events(f"eval-{number}").open("xb").close()
            return f"eval-{number}"
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"{folder.path}: cannot write there ({error.strerror}): an evaluation keeps its rollouts and "
                "its audit log beside the run's; evaluate a copy of the folder"
            ) from error


def newest(folder: RunFolder, config: RunConfig, clock: Clock) -> tuple[Commit, bytes]:
    """The last commit of the run in `folder`, and the trainer's state that it holds.

    Raises:
        ConfigError: there is none.
        StoreError, SchemaError: as the store and the blobs say it.
    """
    if not folder.store.is_file():
        raise ConfigError(
            f"{folder.path}: no checkpoint: {folder.store.name} is missing (queue.type = 'memory' keeps "
            "none): give the folder of a run with queue.type = 'sqlite'"
        )
    store = SqliteStore(folder.store, config.queue.capacity, clock, run=folder.id, readonly=True)
    try:
        last = store.last_commit()
    finally:
        store.close()
    if last is None:
        raise ConfigError(
            f"{folder.path}: no checkpoint: the warm start did not finish; "
            f"`rollwright train --resume {folder.path}` goes on"
        )
    return last, FolderBlobs(folder.blobs / "checkpoints").get(last.checkpoint)


async def _evaluate(
    folder: RunFolder, config: RunConfig, last: Commit, state: bytes, name: str, clock: Clock
) -> list[Evaluated]:
    # torch takes seconds to import: whatever is wrong with the folder is told before
    import torch

    from rollwright.run.parts import build
    from rollwright.run.rollout_side import opened
    from rollwright.trainer.torch_trainer import TorchTrainer
    from rollwright.weights.in_process import InProcessChannel

    torch.set_num_threads(1)
    parts = build(folder, clock)
    parts.store.close()
    # The tokenizer stays that of the run: other tasks are asked in the words that the policy knows.
    parts = replace(
        parts,
        config=config,
        tasks=taskset(config),
        store=MemoryStore(config.queue.capacity, run=folder.id),
    )
    decoder = parts.decoder()
    trainer = TorchTrainer(decoder, config.trainer)
    trainer.restore(state)
    channel = InProcessChannel()
    channel.publish(last.version, trainer.weights())
    events = EventLog(folder.events(name), clock)
    events.emit(RunStarted(run=folder.id, process=name, incarnation=last.version.incarnation))
    kinds = (WorkKind.SAMPLING, WorkKind.SANDBOX)
    try:
        async with (
            leased(clock, events, Stop(), *kinds) as leases,
            opened(parts, channel, decoder, events, leases, name, rounds=True) as side,
        ):
            await side.first_weights()
            return await side.evaluate(name, name=name, example=False)
    finally:
        events.close()
        parts.close()
