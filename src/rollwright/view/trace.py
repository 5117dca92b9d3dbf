"""From any id of a run to everything connected with it, both ways.

Role: `rollwright trace`. Neighbours: `traced` holds what is found; ledger, archive, audit and events are
looked into. Invariants: nothing is written; every lookup uses an index or a search for bytes, so that it
stays quick in a long run; an id that is nowhere, or that could be several things, is one clear line; what is
damaged is named and passed over.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from rollwright.archive.base import Kept, Line
from rollwright.archive.reader import opened
from rollwright.blobs.folder import FolderBlobs
from rollwright.buffer.base import Commit, Entry
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.errors import ConfigError
from rollwright.guard.audit import Entry as AuditEntry
from rollwright.guard.audit import Line as AuditLine
from rollwright.run.folder import RunFolder
from rollwright.types import Identity, Row, Scored, Task, Turn
from rollwright.view.folder import in_order, natural
from rollwright.view.traced import (
    Audited,
    Brief,
    CallSeen,
    CommitSeen,
    Kind,
    PartSeen,
    RolloutSeen,
    SampleSeen,
    TaskSeen,
    Trace,
    TurnSeen,
    WeightsSeen,
)

_VERSION = re.compile(r"[\w.-]+@\d+\.\d+")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
FORMS = (
    "a rollout (0-g12/3.0), a call (0-g12/3.0/1/0), a sample (0-g12/3.0#0), a group (0-g12), a task, "
    "a version (policy@0.3), or the digest of a checkpoint, of weights or of a trace"
)


class _Weights(msgspec.Struct):
    wall: float
    version: str
    digest: str
    gap: float


class Tracer:
    """Looks things up in one run folder; a context manager.

    Raises:
        ConfigError: this is no run folder, or it holds no rollouts yet.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._stack = folder, ExitStack()
        if not folder.config.is_file():
            raise ConfigError(f"{folder.path} is no run folder: {folder.config.name} is missing")
        if not (folder.rollouts.is_file() and folder.store.is_file()):
            raise ConfigError(f"{folder.path} holds no rollouts yet: the run was ended before its first one")

    def __enter__(self) -> Tracer:
        self._archive = opened(self._folder.rollouts)
        self._stack.callback(self._archive.close)
        self._store = SqliteStore(self._folder.store, 1, SystemClock(), readonly=True)
        self._stack.callback(self._store.close)
        self._commits = self._store.commits()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def trace(self, id: str) -> Trace:
        """Everything connected with `id`.

        Raises:
            ConfigError: nothing of that id is in the run.
        """
        if not _storable(id):
            raise ConfigError(f"{id!a} is no text, so nothing of run {self._folder.id}: expected {FORMS}")
        name, _, row = id.partition("#")
        if self._known(name) and (not row or row.isdecimal()):
            return self._rollout(id, name, "sample" if row else "rollout")
        for caller in (id.rsplit("/", 2)[0], id.rsplit("/", 1)[0]):
            if caller != id and self._known(caller):
                return self._rollout(id, caller, "call")
        if lines := self._archive.of_group(id):
            return self._several("group", id, lines)
        if lines := self._archive.of_task(id):
            return self._several("task", id, lines)
        if len(id) == 32 and (lines := self._archive.of_trace(id)):
            return self._rollout(id, lines[0].rollout, "rollout")
        version = id if _VERSION.fullmatch(id) else self._digested(id) if _DIGEST.fullmatch(id) else None
        if version and (found := self._version(id, version)):
            return found
        raise ConfigError(f"'{id}' is nothing of run {self._folder.id}: expected {FORMS}")

    def _known(self, rollout: str) -> bool:
        return self._store.find(rollout) is not None or self._archive.line(rollout) is not None

    def _digested(self, digest: str) -> str | None:
        """The version whose checkpoint or weights have this digest (or beginning of one).

        Raises:
            ConfigError: it begins several digests, or is that of several versions.
        """
        made = {(c.checkpoint, str(c.version)) for c in self._commits if c.checkpoint.startswith(digest)}
        pushed = {(w.digest, w.version) for w in self._pushes(f'"digest":"{digest}')}
        for what, found in (("checkpoints", made), ("weights", pushed)):
            digests = {each for each, _ in found}
            if len(digests) > 1:
                raise ConfigError(f"'{digest}' begins {len(digests)} {what}: give more of its digits")
        versions = sorted({version for _, version in made} or {version for _, version in pushed}, key=natural)
        if made and pushed and {d for d, _ in made} != {d for d, _ in pushed}:
            raise ConfigError(f"'{digest}' begins a checkpoint and weights: give more of its digits")
        if len(versions) > 1:
            raise ConfigError(
                f"'{digest}' is of {len(versions)} versions: ask for one of {', '.join(versions)}"
            )
        return versions[0] if versions else None

    def _rollout(self, id: str, rollout: str, kind: Kind) -> Trace:
        line, entry = self._archive.line(rollout), self._store.find(rollout)
        brief, kept = _brief(rollout, line, entry), self._archive.kept(rollout)
        siblings = self._archive.of_group(brief.group)
        damaged: list[str] = []
        seen = self._seen(brief, kept, entry, damaged)
        if kind == "sample" and int(id.partition("#")[2]) not in [
            int(s.id.rpartition("#")[2]) for s in seen.samples
        ]:
            has = ", ".join(sample.id for sample in seen.samples) or "none: it was not trained"
            raise ConfigError(f"'{id}': rollout {rollout} has no such sample; it has {has}")
        if kind == "call" and id not in [call.id for turn in seen.turns for call in turn.calls]:
            raise ConfigError(f"'{id}': rollout {rollout} made no such call; `rollwright trace` it instead")
        return Trace(
            run=self._folder.id,
            kind=kind,
            id=id,
            task=_task(kept.task) if kept else None,
            siblings=self._briefs(siblings),
            rollout=seen,
            call=id if kind == "call" else "",
            commit=self._commit(brief.version),
            weights=list(self._pushed(brief.version)),
            damaged=damaged,
        )

    def _several(self, kind: Kind, id: str, lines: list[Line]) -> Trace:
        kept = self._archive.kept(lines[0].rollout)
        return Trace(
            run=self._folder.id,
            kind=kind,
            id=id,
            task=_task(kept.task) if kept else None,
            siblings=self._briefs(lines),
        )

    def _version(self, id: str, version: str) -> Trace | None:
        commit, made = self._commit(version), self._archive.lines_of(version)
        if commit is None and not made:
            return None
        trained = [r for c in self._commits if str(c.version) == version for r in c.trained]
        return Trace(
            run=self._folder.id,
            kind="version",
            id=id,
            commit=commit,
            weights=list(self._pushed(version)),
            trained=[_brief(r, self._archive.line(r), self._store.find(r)) for r in trained],
            made=self._briefs(made),
        )

    def _briefs(self, lines: Iterable[Line]) -> list[Brief]:
        return [_brief(line.rollout, line, self._store.find(line.rollout)) for line in in_order(lines)]

    def _seen(self, brief: Brief, kept: Kept | None, entry: Entry | None, damaged: list[str]) -> RolloutSeen:
        identity = kept.scored.rollout.identity if kept else entry.identity if entry else None
        if identity is None:
            line = self._archive.line(brief.rollout)
            identity = Identity(
                run=self._folder.id, job=line.job if line else "train", trace=line.trace if line else ""
            )
        if kept is None:  # it never ended (running, or its process was killed), or cannot be read
            lost = brief.rollout in self._archive.unreadable
            return RolloutSeen(
                brief=brief,
                trace=identity.trace,
                job=identity.job,
                attempt=identity.attempt,
                answer=None,
                error="its record is damaged" if lost else "no record: its process ended before it did",
                seconds=0.0,
                wall=0.0,
                parts=[],
                turns=[],
                samples=[],
            )
        rollout, audit = kept.scored.rollout, self._audited(brief.rollout, damaged)
        return RolloutSeen(
            brief=brief,
            trace=identity.trace,
            job=identity.job,
            attempt=identity.attempt,
            answer=rollout.answer,
            error=rollout.error or (kept.scored.score.reason or None),
            seconds=rollout.seconds,
            wall=rollout.started,
            parts=[
                PartSeen(name=part.name, value=part.value, detail=part.detail)
                for part in kept.scored.score.parts
            ],
            turns=[_turn(number, turn, rollout.rows, audit) for number, turn in enumerate(rollout.turns)],
            samples=list(self._samples(brief, kept.scored)),
        )

    def _samples(self, brief: Brief, scored: Scored) -> Iterator[SampleSeen]:
        for sample in self._archive.samples(brief.rollout):
            trained = sample.weights != 0
            advantages = sample.advantages[trained] if trained.any() else np.zeros(1, np.float32)
            yield SampleSeen(
                id=f"{brief.rollout}#{sample.row}",
                version=sample.version,
                tokens=int(trained.sum()),
                advantage_low=float(advantages.min()),
                advantage_high=float(advantages.max()),
                weight=float(sample.weights.sum()),
                committed=sample.version == brief.version,
            )

    def _commit(self, version: str) -> CommitSeen | None:
        found: list[Commit] = [c for c in self._commits if version and str(c.version) == version]
        if not found:
            return None
        checkpoints = self._folder.blobs / "checkpoints"
        digest = found[0].checkpoint
        return CommitSeen(
            version=version,
            position=found[-1].position,
            checkpoint=digest,
            kept=bool(digest) and checkpoints.is_dir() and FolderBlobs(checkpoints).has(digest),
            trained=sum(len(commit.trained) for commit in found),
            dropped=sum(len(commit.dropped) for commit in found),
        )

    def _pushed(self, version: str) -> Iterator[WeightsSeen]:
        for weights in self._pushes('"event":"weights"') if version else ():
            if weights.version == version:
                yield WeightsSeen(version=version, digest=weights.digest, gap=weights.gap, wall=weights.wall)

    def _pushes(self, text: str) -> Iterator[_Weights]:
        for path in sorted(self._folder.path.glob("events-*.jsonl")):
            for line in _lines(path, text):
                try:
                    yield msgspec.json.decode(line, type=_Weights)
                except msgspec.MsgspecError:
                    continue  # another event that holds the text

    def _audited(self, rollout: str, damaged: list[str]) -> dict[str, list[Audited]]:
        """Call id → its entries, of all audit logs; lines that are not what was written go to `damaged`."""
        found: dict[str, list[Audited]] = {}
        text = '"rollout":' + msgspec.json.encode(rollout).decode()
        for path in sorted(self._folder.path.glob("audit-*.jsonl")):
            for data in _lines(path, text):
                try:
                    line = msgspec.json.decode(data, type=AuditLine)
                    if hashlib.sha256(bytes(line.entry)).hexdigest() != line.sha256:
                        raise ValueError("changed since it was written")
                    entry = msgspec.json.decode(line.entry, type=AuditEntry)
                    body = msgspec.json.decode(entry.body)
                except ValueError as error:  # msgspec's errors and UnicodeDecodeError are ones
                    damaged.append(f"{path.name} line {_number(path, data)}: {error}")
                    continue
                if entry.identity is not None and entry.identity.rollout == rollout:
                    found.setdefault(entry.call, []).append(
                        Audited(
                            log=path.name, number=entry.number, wall=entry.wall, kind=entry.kind, body=body
                        )
                    )
        return found


def _storable(text: str) -> bool:
    """Whether `text` has an encoding: what a shell passes on may have none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(path: Path, line: bytes) -> int:
    """The place of a line in its file, 1-based."""
    return path.read_bytes().partition(line)[0].count(b"\n") + 1


def _lines(path: Path, text: str) -> Iterator[bytes]:
    """The lines of a file that hold `text`."""
    if not path.stat().st_size:
        return
    sought = text.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(sought)
        while at >= 0:
            start = data.rfind(b"\n", 0, at) + 1
            end = data.find(b"\n", at)
            if end < 0:
                return  # torn: its writer was killed
            yield data[start:end]
            at = data.find(sought, end)


def _brief(rollout: str, line: Line | None, entry: Entry | None) -> Brief:
    identity = entry.identity if entry else None
    return Brief(
        rollout=rollout,
        group=line.group if line else identity.group if identity else "",
        task=line.task if line else identity.task if identity else "",
        outcome=line.outcome if line else "",
        value=line.value if line else None,
        disposition=entry.disposition.value if entry else "",
        reason=entry.reason if entry else "",
        version=entry.version if entry else "",
    )


def _task(task: Task) -> TaskSeen:
    return TaskSeen(
        id=task.id,
        set=task.set,
        messages=[(message.role, message.content) for message in task.messages],
        checks=[str(msgspec.to_builtins(check)["kind"]) for check in task.checks],
    )


def _turn(number: int, turn: Turn, rows: tuple[Row, ...], audit: dict[str, list[Audited]]) -> TurnSeen:
    row = rows[turn.row] if turn.row < len(rows) else None
    logprobs = row.logprobs[turn.start : turn.end] if row is not None else np.zeros(0, np.float32)
    spans = row.spans if row is not None else ()
    versions = [str(s.version) for s in spans if s.start < turn.end and s.end > turn.start]
    results = {result.call: result for result in turn.results}
    calls = []
    for call in turn.calls:
        result = results.get(call.id)
        calls.append(
            CallSeen(
                id=call.id,
                name=call.name,
                arguments=call.arguments,
                raw=call.raw,
                status=result.status.value if result else "",
                content=result.content if result else "",
                seconds=result.seconds if result else 0.0,
                audit=audit.get(call.id, []),
            )
        )
    return TurnSeen(
        number=number,
        text=turn.text,
        tokens=turn.end - turn.start,
        versions=list(dict.fromkeys(versions)),
        mean_logprob=float(logprobs.mean()) if len(logprobs) else None,
        model_seconds=turn.model_seconds,
        tool_seconds=turn.tool_seconds,
        calls=calls,
    )
