"""Invariants 1 and 3 where a template rewrites history: rollouts in several rows go through agent, real
tools, queue, archive, trainer, trace and report; what is trained is what was sampled, once, in the row it was
sampled in, and cutting changes no rollout's weight."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import chat_styles as styles
import numpy as np
import pytest
import torch
from needs import needed
from opened import until_end

from rollwright.agents.chat_template import ChatTemplate
from rollwright.agents.config import AgentConfig
from rollwright.agents.probe import Mode, probed
from rollwright.algo.config import GrpoConfig, RlooConfig
from rollwright.archive.sqlite import SqliteArchive
from rollwright.buffer.base import Commit
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.events import NullSink
from rollwright.guard.audit import AuditLog
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.rollout.config import RolloutConfig
from rollwright.rollout.factory import RolloutFactory
from rollwright.run.folder import RunFolder, create
from rollwright.sandbox.config import AutoSandbox
from rollwright.tasks.config import LimitsConfig, RecordsConfig
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.trainer.config import TrainerConfig
from rollwright.trainer.torch_trainer import TorchTrainer
from rollwright.types import (
    Batch,
    CallStatus,
    Completion,
    Group,
    Identity,
    Ints,
    PolicyVersion,
    Provenance,
    Rollout,
    Sampling,
    Score,
    Task,
)
from rollwright.view.report import write_report
from rollwright.view.trace import Tracer

needed("tokenizers", module=True)

GROUPS, SIZE = 4, 4
VERSION = PolicyVersion(run="run")


class Recording:
    """The scripted engine, with a note of every completion by session (a rollout's id)."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.said: dict[str, list[tuple[Ints, Completion]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Ints, sampling: Sampling, *, request: str, session: str) -> Completion:
        made = await self._engine.generate(prompt, sampling, request=request, session=session)
        self.said.setdefault(session, []).append((np.array(prompt), made))
        return made


class ByLength:
    """Gives every group a signal."""

    async def score(self, task: Task, rollout: Rollout, sandbox: object) -> Score:
        if not rollout.outcome.scorable:
            return Score.unscorable(rollout.outcome.value)
        return Score(value=float(len(rollout.turns)) + int(rollout.identity.rollout.split("/")[1][0]) / 10)


def speaking(template: ChatTemplate, seed: int) -> Any:
    """A policy that thinks or not, calls rightly and wrongly, breaks off, and answers at last."""
    rng, encode = random.Random(seed), template.codec.encode_marked

    def script(prompt: tuple[int, ...]) -> tuple[Sequence[int], Sequence[float]]:
        thought = rng.choice(["", "<think>\nHm, é😀.\n</think>\n\n", "<think>It is</think>"])
        call = rng.choice(
            [
                '<tool_call>\n{"name": "sql", "arguments": {"query": "SELECT 1"}}\n</tool_call>',
                '<tool_call>{"name": "sql", "arguments": "{\\"query\\": \\"SELECT 2\\"}"}</tool_call>',
                "<tool_call>sql</tool_call>",
                "The answer is 7.",
            ]
        )
        ids = encode(thought + call)
        ids = ids[: len(ids) // 2] if rng.random() < 0.15 else [*ids, template.stop[0]]
        return ids, [-rng.random() for _ in ids]

    return script


@asynccontextmanager
async def groups(tmp_path: Path, template: ChatTemplate, archive: SqliteArchive) -> AsyncIterator[Any]:
    """(engine, store), once all groups are in the queue."""
    clock = SystemClock()
    limits = LimitsConfig(max_tokens=2000, turn_tokens=200, max_turns=5)
    engine = Recording(ScriptedEngine(speaking(template, 3), version=VERSION))
    sandboxes = AutoSandbox(max_live=16).build(tmp_path / "sandboxes", clock=clock)
    store = until_end(SqliteStore(tmp_path / "run.db", GROUPS, clock, run="run"))
    audit = until_end(AuditLog(tmp_path / "audit-rollouts.jsonl", clock))
    factory = RolloutFactory(
        tasks=RecordsConfig(hops=2, limits=limits).build(),
        agent=AgentConfig().build(),
        engine=engine,
        door=ToolDoor(ToolRegistry.installed(), GuardChain([AllowList()]), audit, clock=clock),
        sandboxes=sandboxes,
        reward=ByLength(),
        archive=archive,
        ledger=store,
        codec=template.codec,
        template=template,
        clock=clock,
        events=NullSink(),
        config=RolloutConfig(group_size=SIZE, concurrency=8),
        identity=Identity(run="run"),
        rng=random.Random(0),
    )
    await sandboxes.start()
    await engine.start()
    try:
        async with aclosing(factory.groups(iter(range(GROUPS)))) as reports:
            async for report in reports:
                assert report.group is not None, report.reason
                assert store.put(report.group)
        yield engine, store
    finally:
        await engine.close()
        await sandboxes.close()


def check(rollout: Rollout, said: list[tuple[Ints, Completion]]) -> None:
    """Every completion lies in the row of its turn, behind the very prompt it answered, and nowhere else
    does a token count as sampled."""
    assert len(rollout.turns) == len(said)
    counts = [0] * len(rollout.rows)
    for turn, (prompt, completion) in zip(rollout.turns, said, strict=True):
        row, at = rollout.rows[turn.row], slice(turn.start, turn.end)
        assert np.array_equal(row.tokens[: turn.start], prompt)
        assert np.array_equal(row.tokens[at], completion.tokens)
        assert np.array_equal(row.logprobs[at], completion.logprobs)
        assert row.sampled[at].all()
        counts[turn.row] += len(completion.tokens)
    assert counts == [int(row.sampled.sum()) for row in rollout.rows]
    for row in rollout.rows:
        covered = np.zeros(len(row.tokens), dtype=bool)
        for span in row.spans:
            covered[span.start : span.end] = True
        assert np.array_equal(covered, row.sampled)
        assert row.provenance[0] == Provenance.PROMPT


def trained(
    folder: RunFolder, archive: SqliteArchive, store: SqliteStore, found: list[Group], vocab: int
) -> None:
    """One step on all groups, kept and committed."""
    decoder = Decoder(ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn=32, context=2048), vocab)
    decoder.initialise(torch.Generator().manual_seed(0))
    samples = [sample for group in found for sample in GrpoConfig().build().samples(group)]
    report = TorchTrainer(decoder, TrainerConfig()).step(Batch(samples=tuple(samples), version=VERSION))
    sampled = sum(int(row.sampled.sum()) for g in found for m in g.members for row in m.rollout.rows)
    assert report.metrics["tokens"] == sampled, "each sampled token is trained once"
    version = VERSION.next()
    archive.trained(version, samples)
    names = tuple(member.rollout.identity.rollout for group in found for member in group.members)
    store.commit(Commit(version=version, position=GROUPS, trained=names, dropped=(), checkpoint="0" * 64))


async def test_rollouts_in_several_rows_are_trained_and_shown(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    template, verdict = probed(styles.chat(styles.FORGETFUL))
    assert verdict.mode is Mode.REWRITES
    folder = create(load([], [f"folder={str(tmp_path)!r}"]))
    archive = until_end(SqliteArchive(folder.rollouts))
    async with groups(folder.path, template, archive) as (engine, store):
        found = [queued.group for queued in store.read(0, GROUPS)]
        rollouts = {m.rollout.identity.rollout: m.rollout for group in found for m in group.members}
        for name, rollout in rollouts.items():
            check(rollout, engine.said[name])
        several = [rollout for rollout in rollouts.values() if len(rollout.rows) > 1]
        statuses = {r.status for rollout in rollouts.values() for turn in rollout.turns for r in turn.results}
        assert len(several) >= 5 and {CallStatus.OK, CallStatus.MALFORMED} <= statuses

        for config in (GrpoConfig(), GrpoConfig(aggregation="sequence"), RlooConfig()):
            weights: dict[str, float] = dict.fromkeys(rollouts, 0.0)
            for group in found:
                for sample in config.build().samples(group):
                    weights[sample.rollout] += float(sample.weights.sum())
                    assert np.array_equal(sample.weights != 0, sample.row.sampled)
            for name, rollout in rollouts.items():
                size = sum(int(row.sampled.sum()) for row in rollout.rows)
                assert weights[name] == pytest.approx(1.0 if config.aggregation == "sequence" else size)

        trained(folder, archive, store, found, template.codec.size)
        archive.flush()
        with Tracer(folder) as tracer:
            seen_all = {name: tracer.trace(name).rollout for name in rollouts}
        for name, rollout in rollouts.items():
            seen = seen_all[name]
            assert seen is not None
            assert [sample.id for sample in seen.samples] == [f"{name}#{i}" for i in range(len(rollout.rows))]
            assert [s.tokens for s in seen.samples] == [int(row.sampled.sum()) for row in rollout.rows]
            told = [turn.mean_logprob for turn in seen.turns]
            assert told == pytest.approx([float(c.logprobs.mean()) for _, c in engine.said[name]])
        write_report(folder)
        assert folder.report.stat().st_size > 10_000


async def test_a_template_that_keeps_its_history_makes_one_row(tmp_path: Path) -> None:
    template, _ = probed(styles.chat(styles.THINKING))
    archive = until_end(SqliteArchive(tmp_path / "rollouts.db"))
    async with groups(tmp_path, template, archive) as (engine, store):
        for queued in store.read(0, GROUPS):
            for member in queued.group.members:
                assert len(member.rollout.rows) == 1
                check(member.rollout, engine.said[member.rollout.identity.rollout])
