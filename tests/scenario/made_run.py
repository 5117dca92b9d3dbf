"""A run folder made without a run: records of every kind through the real archive, store and event log."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollwright.agents.template import CONTROL
from rollwright.archive.sqlite import SqliteArchive
from rollwright.buffer.base import Commit, Drop
from rollwright.buffer.sqlite import SqliteStore
from rollwright.config import load
from rollwright.evals.statistics import wilson
from rollwright.events import Evaluated, EventLog, GroupEnded, Metrics, Noted, Resumed, RunStarted, StepEnded
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.run.folder import RunFolder, create
from rollwright.testing.clock import FakeClock
from rollwright.types import (
    AnswerEquals,
    CallStatus,
    Disposition,
    Environment,
    ExecResult,
    File,
    Finish,
    Group,
    Identity,
    Message,
    Outcome,
    Part,
    PolicyVersion,
    Provenance,
    Rollout,
    Row,
    Sample,
    Score,
    Scored,
    Task,
    ToolCall,
    ToolResult,
    Turn,
    VersionSpan,
)

PER_STEP = 16
"""Groups of one step."""
PIECES = ("SELECT ", " FROM ", " WHERE ", "people", "name", "city", "boss", "error: ")


@dataclass
class Maker:
    """Makes rollouts; `hostile` text stands in every field that can hold text."""

    tokenizer: PieceTokenizer
    rng: random.Random
    hostile: str = ""
    encoded: dict[str, list[int]] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        if text not in self.encoded:
            self.encoded[text] = self.tokenizer.encode(text)
        return self.encoded[text]

    def task(self, split: str, number: int) -> Task:
        h = self.hostile
        sql = "CREATE TABLE people (name TEXT, city TEXT); INSERT INTO people VALUES ('zebe', 'viti');"
        return Task(
            id=f"made/{split}/{number}{h}",
            set=f"made{h}",
            messages=(
                Message(role="system", content="people(name boss city)" + h),
                Message(role="user", content=f"who is the boss of number {number % 50}?{h}"),
            ),
            tools=("sql", *([h] if h else [])),
            checks=(AnswerEquals(expected=f"viti{h}"),),
            environment=Environment(files=(File(path=f"a.txt{h}", text=h),) if h else (), sql=sql + h),
            tags={"hops": "1", f"tag{h}": h},
        )

    def scored(self, task: Task, identity: Identity, version: PolicyVersion, chance: float) -> Scored:
        outcome = Outcome.ANSWERED if self.rng.random() > 0.03 else Outcome.SANDBOX_LOST
        value = float(self.rng.random() < chance) if outcome.scorable else None
        row, turns = self._row(task, identity, version)
        h = self.hostile
        parts = (Part(name="answer_equals" + h, layer="meaning", value=value or 0.0, detail="said" + h),)
        return Scored(
            rollout=Rollout(
                identity=identity,
                rows=(row,),
                turns=turns,
                outcome=outcome,
                answer="viti" + h,
                error=None if outcome.scorable else "the sandbox died" + h,
                started=1.7e9,
                seconds=self.rng.random() * 3,
            ),
            score=Score(
                value=value,
                parts=parts if value is not None else (),
                reason="" if value is not None else "no sandbox" + h,
                model_version="rules" + h,
            ),
        )

    def _row(self, task: Task, identity: Identity, version: PolicyVersion) -> tuple[Row, tuple[Turn, ...]]:
        rng, h = self.rng, self.hostile
        tokens: list[int] = []
        sources: list[int] = []
        spans, turns = [], []

        def add(text: str, source: Provenance) -> tuple[int, int]:
            ids, start = self.ids(text), len(tokens)
            tokens.extend(ids)
            sources.extend([source] * len(ids))
            return start, len(tokens)

        add("".join(message.content for message in task.messages), Provenance.PROMPT)
        for number in range(rng.randint(1, 3)):
            query = f"SELECT city FROM people WHERE name='{rng.choice('abcdefgh')}ütz{rng.randint(0, 9)}'"
            start, end = add(query + h, Provenance.SAMPLED)
            spans.append(VersionSpan(version=version, start=start, end=end))
            status = rng.choice((CallStatus.OK, CallStatus.OK, CallStatus.ERROR))
            content = ("viti" if status is CallStatus.OK else "error: no such column") + h
            add(content, Provenance.TOOL)
            call = ToolCall(
                id=f"{identity.rollout}/{number}{h}",
                name="sql" + h,
                arguments={"query" + h: query + h},
                raw=h,
            )
            ran = ExecResult(status=status, stdout="out" + h, stderr="err" + h, value="value" + h)
            result = ToolResult(call=call.id, status=status, content=content, execution=ran, seconds=0.01)
            turns.append(
                Turn(
                    row=0,
                    start=start,
                    end=end,
                    text=query + h,
                    finish=Finish.STOP,
                    calls=(call,),
                    results=(result,),
                )
            )
        marks = np.array(sources, dtype=np.uint8)
        drawn = np.array([-rng.expovariate(2) for _ in sources], dtype=np.float32)
        logprobs = np.where(marks == Provenance.SAMPLED, drawn, 0).astype(np.float32)
        row = Row(tokens=np.array(tokens, np.int32), provenance=marks, logprobs=logprobs, spans=tuple(spans))
        return row, tuple(turns)


def made_run(
    root: Path, rollouts: int = 320, *, size: int = 8, hostile: str = "", finished: bool = True
) -> RunFolder:
    """A run folder with `rollouts` rollouts: an evaluation before, groups of `size`, an evaluation after.

    With `finished` false it is as a kill leaves it: rollouts running, groups queued, nothing after.
    """
    sets = ["name=made", "loop.steps=99", f"folder={json.dumps(str(root))}"]
    if hostile:
        named = json.dumps(hostile, ensure_ascii=False)
        sets += ['tasks.type="jsonl"', 'tasks.train="a"', 'tasks.heldout="b"', f"tasks.name={named}"]
    folder = create(load([], sets))
    tokenizer = PieceTokenizer(PIECES, CONTROL)
    folder.tokenizer.write_text(tokenizer.to_json())
    clock, maker = FakeClock(), Maker(tokenizer, random.Random(0), hostile)
    events = EventLog(folder.events("trainer"), clock)
    archive = SqliteArchive(folder.rollouts)
    store = SqliteStore(folder.store, 64, clock, run=folder.id)
    try:
        _fill(folder, maker, archive, store, events, rollouts, size, finished)
    finally:
        archive.close()
        store.close()
        events.close()
    if finished:
        folder.finished.touch()
    return folder


def _fill(
    folder: RunFolder,
    maker: Maker,
    archive: SqliteArchive,
    store: SqliteStore,
    events: EventLog,
    rollouts: int,
    size: int,
    finished: bool,
) -> None:
    h = maker.hostile
    events.emit(RunStarted(run=folder.id, process="trainer", versions={"torch": "1.0" + h}))
    events.emit(Noted(level="warning" + h, text="a warning" + h))
    evaluated = max(8, rollouts // 20)
    groups = max(1, (rollouts - (2 if finished else 1) * evaluated) // size)
    _evaluate(folder, maker, archive, store, events, "before", evaluated, 0.3, 0)
    step, waiting = 0, []
    for number in range(groups):
        version = store.lineage().version(step)
        chance = 0.3 + 0.6 * number / groups
        waiting.append(_group(folder, maker, archive, store, events, number, version, chance, size))
        events.emit(Metrics(process="rollouts", values={"rollout/idle_share": 0.1, "queue/depth": 3.0}))
        if len(waiting) == PER_STEP or (finished and number == groups - 1):
            step += 1
            _train(archive, store, events, waiting, step, number + 1)
            waiting = []
    if finished:
        _evaluate(folder, maker, archive, store, events, "after", evaluated, 0.9, step)
    else:
        store.start([Identity(run=folder.id, task="made/train/0", group="0-open", rollout="0-open/0.0")])
        store.fork(step)
        events.emit(Resumed(step=step, version="policy@1.0"))


def _identity(folder: RunFolder, task: Task, group: str, rollout: str, job: str) -> Identity:
    trace = f"{hash((group, rollout)) & (2**128 - 1):032x}"
    return Identity(run=folder.id, job=job, task=task.id, group=group, rollout=rollout, trace=trace)


def _group(
    folder: RunFolder,
    maker: Maker,
    archive: SqliteArchive,
    store: SqliteStore,
    events: EventLog,
    number: int,
    version: PolicyVersion,
    chance: float,
    size: int,
) -> Group:
    task, id = maker.task("train", number), f"0-g{number}"
    identities = [_identity(folder, task, id, f"{id}/{member}.0", "train") for member in range(size)]
    store.start(identities)
    members = tuple(maker.scored(task, identity, version, chance) for identity in identities)
    for member in members:
        archive.add(task, member)
    group = Group(id=id, task=task.id, members=members)
    assert store.put(group)
    kept = number % 3 != 0
    reason = "" if kept else "all right" + maker.hostile
    events.emit(GroupEnded(group=id, task=task.id, kept=kept, reason=reason, mean=0.5))
    return group


def _train(
    archive: SqliteArchive,
    store: SqliteStore,
    events: EventLog,
    groups: list[Group],
    step: int,
    position: int,
) -> None:
    version = store.lineage().version(step)
    members = [member for group in groups for member in group.members]
    samples = [
        Sample(
            rollout=member.rollout.identity.rollout,
            group=member.rollout.identity.group,
            row=row,
            advantages=np.where(row.sampled, (member.score.value or 0) - 0.5, 0).astype(np.float32),
            weights=row.sampled.astype(np.float32),
        )
        for member in members
        if member.score.value is not None
        for row in member.rollout.rows
    ]
    archive.trained(version, samples)
    store.commit(
        Commit(
            version=version,
            position=position,
            trained=tuple(m.rollout.identity.rollout for m in members if m.score.value is not None),
            dropped=tuple(
                Drop(
                    rollout=m.rollout.identity.rollout,
                    disposition=Disposition.UNSCORABLE,
                    reason=m.score.reason,
                )
                for m in members
                if m.score.value is None
            ),
            checkpoint=f"{step:064x}",
        )
    )
    metrics = {"train/reward": 0.5, "train/entropy": 1 / step, "train/lag_mean": 1.0, "train/lag_max": 2.0}
    events.emit(StepEnded(step=step, incarnation=0, metrics={**metrics, "train/idle_share": 0.2}))


def _evaluate(
    folder: RunFolder,
    maker: Maker,
    archive: SqliteArchive,
    store: SqliteStore,
    events: EventLog,
    label: str,
    count: int,
    chance: float,
    step: int,
) -> None:
    values, ends, version = [], [], store.lineage().version(step)
    tasks = [maker.task("heldout", number) for number in range(count)]
    names = [f"0-{label}-sampled/{number}" for number in range(count)]
    identities = [
        _identity(folder, task, name, f"{name}.0", "eval") for task, name in zip(tasks, names, strict=True)
    ]
    store.start(identities)
    for task, identity in zip(tasks, identities, strict=True):
        scored = maker.scored(task, identity, version, chance)
        archive.add(task, scored)
        end = Disposition.VOID if scored.score.value is None else Disposition.EVALUATED
        ends.append(Drop(rollout=identity.rollout, disposition=end, reason="lost" + maker.hostile))
        values += [] if scored.score.value is None else [scored.score.value]
    store.drop(ends)
    low, high = wilson(int(sum(values)), len(values))
    events.emit(
        Evaluated(
            label=label + maker.hostile,
            mode="sampled",
            successes=int(sum(values)),
            trials=len(values),
            low=low,
            high=high,
            metrics={"unscorable": float(count - len(values))},
            step=step,
            rollouts=f"0-{label}-sampled",
        )
    )
