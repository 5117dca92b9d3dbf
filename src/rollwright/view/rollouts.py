"""Rollouts as the report carries them: an index of all, and bodies in compressed chunks.

Role: what a browser needs to list, find and open a rollout. Neighbours: the archive gives rollouts, `report`
embeds what is made here, `data.js` reads it. Invariants: the index lists every rollout, embedded or not; a
chunk is base64 of gzip of JSON, so nothing in it is ever markup; a chunk is decoded only when one of its
rollouts is opened.
"""

from __future__ import annotations

import base64
import gzip
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollwright.archive.base import Kept, Line, Trained
from rollwright.types import Row, Task, ToolResult, Turn
from rollwright.view.curves import step_of
from rollwright.view.folder import RunView

CHUNK = 64
"""Rollouts decoded together: neighbours, so that siblings and their task are packed once."""
PAGE_BYTES = 18_000_000
"""Characters that the chunks take at most, as estimated from a few of them."""
WORST = 1.4
"""Embedded characters for each stored byte at most: what does not shrink any further grows by base64."""
TEXT = 20_000
"""Characters of one text that are embedded."""
LEVEL = 5
"""Of gzip."""

_EVALUATION = re.compile(r"(?:\d+-)?(?P<label>.+)-(?P<mode>sampled|greedy)/\d+")


class Packed(msgspec.Struct):
    """What was embedded: base64 chunks, where each rollout lies, and call statuses counted on the way."""

    chunks: list[str]
    places: dict[str, tuple[int, int]]
    """Rollout → (chunk, place in it)."""
    calls: Counter[str]


def split_of(line: Line) -> str:
    """`train`, or which evaluation: `before, sampled`."""
    found = _EVALUATION.fullmatch(line.group) if line.job == "eval" else None
    return f"{found['label']}, {found['mode']}" if found else line.job


def chosen(view: RunView, limit: int) -> list[str]:
    """Ids of the rollouts to embed, in order: all, or at most `limit` of whole groups from the whole run."""
    if view.archive is None:
        return []
    groups: dict[str, list[str]] = {}
    for line in view.lines:
        groups.setdefault(line.group, []).append(line.rollout)
    share = min(1.0, limit / max(1, len(view.lines)), PAGE_BYTES / max(1.0, _characters(view)))
    taken: set[str] = set()
    due = seen = 0.0
    for group in groups.values():
        seen += len(group) * share
        if share == 1.0 or due + len(group) <= seen + 1e-9:
            taken.update(group)
            due += len(group)
    return [line.rollout for line in view.lines if line.rollout in taken]


def _characters(view: RunView) -> float:
    """About how many characters all rollouts take; exact only where they may be too many."""
    sizes = view.archive.sizes() if view.archive else {}
    total = sum(sizes.values())
    if total * WORST <= PAGE_BYTES:
        return total * WORST
    starts = range(0, len(view.lines), max(1, len(view.lines) // 4))
    tried = list(dict.fromkeys(line.rollout for at in starts for line in view.lines[at : at + CHUNK // 4]))
    taken = sum(len(chunk) for chunk in packed(view, tried).chunks)
    return total * taken / max(1, sum(sizes.get(rollout, 0) for rollout in tried))


def packed(view: RunView, rollouts: Sequence[str]) -> Packed:
    """`rollouts` in chunks."""
    result = Packed([], {}, Counter())
    if view.archive is None:
        return result
    found = view.archive.whole(rollouts)
    while part := list(_take(found, CHUNK)):
        tasks: dict[str, int] = {}
        shown: list[dict[str, Any]] = []
        bodies: list[dict[str, Any]] = []
        for line, kept, trained in part:
            place = (len(result.chunks), len(bodies))
            result.places[kept.scored.rollout.identity.rollout] = place
            result.calls.update(r.status.value for t in kept.scored.rollout.turns for r in t.results)
            if line.digest not in tasks:
                tasks[line.digest] = len(tasks)
                shown.append(_task(kept.task))
            bodies.append(_body(kept, trained, tasks[line.digest]))
        result.chunks.append(squeezed({"tasks": shown, "rollouts": bodies}))
    return result


def _take(found: Iterator[Any], count: int) -> Iterator[Any]:
    for _, each in zip(range(count), found, strict=False):
        yield each


def squeezed(value: Any) -> str:
    """`value` as base64 of gzip of JSON; the same each time."""
    return base64.b64encode(gzip.compress(msgspec.json.encode(value), LEVEL, mtime=0)).decode()


def index(view: RunView, places: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Every rollout in columns; names that repeat are given once. A chunk of -1: not embedded."""
    lines = view.lines
    entries = view.ledger.entries if view.ledger else {}
    ends = [entries.get(line.rollout) for line in lines]
    spots = [places.get(line.rollout, (-1, -1)) for line in lines]
    return {
        "id": [line.rollout for line in lines],
        "group": _named([line.group for line in lines]),
        "task": _named([line.task for line in lines]),
        "split": _named([split_of(line) for line in lines]),
        "outcome": _named([line.outcome for line in lines]),
        "disposition": _named([end.disposition.value if end else "" for end in ends]),
        "reason": _named([end.reason if end else "" for end in ends]),
        "trained": _named([end.version if end else "" for end in ends]),
        "made": _named([" ".join(line.versions) for line in lines]),
        "step": [step_of(line) for line in lines],
        "reward": [line.value for line in lines],
        "turns": [line.turns for line in lines],
        "sampled": [line.sampled for line in lines],
        "seconds": [round(line.seconds, 3) for line in lines],
        "trace": [line.trace for line in lines],
        "chunk": [chunk for chunk, _ in spots],
        "place": [place for _, place in spots],
    }


def _named(values: Sequence[str]) -> dict[str, list[Any]]:
    names: dict[str, int] = {}
    at = [names.setdefault(value, len(names)) for value in values]
    return {"names": list(names), "at": at}


def _cut(text: str) -> str:
    rest = len(text) - TEXT
    return text if rest <= 0 else f"{text[:TEXT]}\n… {rest} more characters are left out here"


def _task(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "set": task.set,
        "messages": [[message.role, _cut(message.content)] for message in task.messages],
        "tools": task.tools,
        "checks": [_cut(_json(check)) for check in task.checks],
        "files": [[file.path, _cut(file.text)] for file in task.environment.files],
        "sql": _cut(task.environment.sql),
        "limits": msgspec.to_builtins(task.limits),
        "tags": task.tags,
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _body(kept: Kept, trained: Sequence[Trained], task: int) -> dict[str, Any]:
    """One rollout whole; `task` is its place in the chunk's tasks."""
    rollout, score = kept.scored.rollout, kept.scored.score
    samples = {sample.row: sample for sample in trained}
    return {
        "id": rollout.identity.rollout,
        "task": task,
        "agent": rollout.identity.agent,
        "attempt": rollout.identity.attempt,
        "answer": None if rollout.answer is None else _cut(rollout.answer),
        "error": None if rollout.error is None else _cut(rollout.error),
        "started": rollout.started,
        "scorer": score.model_version,
        "unscorable": _cut(score.reason),
        "parts": [[part.name, part.layer, part.value, _cut(part.detail)] for part in score.parts],
        "turns": [_turn(turn) for turn in rollout.turns],
        "rows": [_row(row, samples.get(number)) for number, row in enumerate(rollout.rows)],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "row": turn.row,
        "start": turn.start,
        "end": turn.end,
        "text": _cut(turn.text),
        "finish": turn.finish.value,
        "prompt": turn.prompt_tokens,
        "cached": turn.cached,
        "model": round(turn.model_seconds, 4),
        "tool": round(turn.tool_seconds, 4),
        "calls": [
            {
                "id": call.id,
                "name": call.name,
                "arguments": _cut(_json(call.arguments)),
                "raw": _cut(call.raw),
            }
            for call in turn.calls
        ],
        "results": [_result(result) for result in turn.results],
    }


def _result(result: ToolResult) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "call": result.call,
        "status": result.status.value,
        "content": _cut(result.content),
        "seconds": round(result.seconds, 4),
    }
    if result.repeated:
        shown["repeated"] = True
    if result.terminated:
        shown["terminated"] = True
    execution = result.execution
    if execution:  # what the model was told holds most of it
        more = {"stdout": execution.stdout, "stderr": execution.stderr, "value": execution.value or ""}
        shown |= {name: _cut(text) for name, text in more.items() if text and text not in result.content}
        if execution.exit_code:
            shown["exit"] = execution.exit_code
    return shown


def _row(row: Row, trained: Trained | None) -> dict[str, Any]:
    """Token ids; provenance, advantages and weights as runs `[value, length]`; logprobs of the sampled
    tokens in thousandths of a nat."""
    shown: dict[str, Any] = {
        "tokens": row.tokens.tolist(),
        "provenance": _runs(row.provenance),
        "logprobs": _thousandths(row.logprobs[row.sampled]),
        "spans": [[str(span.version), span.start, span.end] for span in row.spans],
    }
    if trained is not None:
        shown["version"] = trained.version
        shown["advantages"] = _runs(trained.advantages)
        shown["weights"] = _runs(trained.weights)
    return shown


def _runs(values: npt.NDArray[Any]) -> list[list[Any]]:
    """`[value, length]` of each run of equal values; None stands for NaN."""
    if not len(values):
        return []
    edges = [0, *((values[1:] != values[:-1]).nonzero()[0] + 1).tolist(), len(values)]
    firsts: list[Any] = values[edges[:-1]].tolist()
    if values.dtype.kind == "f":
        firsts = [round(first, 5) if math.isfinite(first) else None for first in firsts]
    return [[first, edges[i + 1] - edges[i]] for i, first in enumerate(firsts)]


def _thousandths(values: npt.NDArray[np.float32]) -> list[int | None]:
    sound = np.isfinite(values) & (np.abs(values) < 1e9)
    scaled: list[int | None] = np.rint(np.where(sound, values, 0) * 1000.0).astype(np.int64).tolist()
    return scaled if sound.all() else [value if ok else None for value, ok in zip(scaled, sound, strict=True)]
