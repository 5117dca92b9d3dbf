"""A trace as a tree for people: where a thing came from above it, what became of it below.

Role: the text form of `rollwright trace`. Neighbours: `trace` found what is drawn. Invariants: what a model
or a tool said is shown as plain text; a list is cut at `LIMIT` and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.text import Text
from rich.tree import Tree

from rollwright.monitor.plain import clean
from rollwright.view.traced import Brief, CallSeen, RolloutSeen, Trace, TurnSeen

LIMIT = 12
"""Rollouts of one list that are shown."""
LONGEST = 300
"""Characters of one text that are shown."""


def tree(trace: Trace) -> Tree:
    """The whole trace."""
    root = Tree(_line(trace.kind, trace.id, f"run {trace.run}"))
    if trace.kind == "version":
        return _version(root, trace)
    if trace.task is not None:
        _task(root, trace)
    if trace.rollout is None:
        _several(root, "rollouts", trace.siblings)
        return root
    others = [brief for brief in trace.siblings if brief.rollout != trace.rollout.brief.rollout]
    _rollout(root, trace.rollout, trace.call, trace.id)
    for line in trace.damaged:
        root.add(_said("damaged", f"{line}: passed over", "red"))
    if others:
        _several(root, f"siblings in group {trace.rollout.brief.group}", others)
    _step(root, trace)
    return root


def _version(root: Tree, trace: Trace) -> Tree:
    _step(root, trace)
    _several(root, "trained on", trace.trained)
    for job, briefs in (
        ("trained later", _ended(trace.made, True)),
        ("not trained", _ended(trace.made, False)),
    ):
        _several(root, f"sampled, and {job}", briefs)
    return root


def _ended(briefs: Sequence[Brief], trained: bool) -> list[Brief]:
    return [brief for brief in briefs if bool(brief.version) == trained]


def _task(root: Tree, trace: Trace) -> None:
    assert trace.task is not None
    task = root.add(
        _line("task", trace.task.id, f"set {trace.task.set}; checks {', '.join(trace.task.checks)}")
    )
    for role, content in trace.task.messages:
        task.add(_said(role, content))


def _rollout(root: Tree, seen: RolloutSeen, call: str, asked: str) -> None:
    brief = seen.brief
    began = datetime.fromtimestamp(seen.wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seen.wall else "–"
    node = root.add(_line("rollout", brief.rollout, _fate(brief)))
    node.add(
        Text(f"{seen.job}, attempt {seen.attempt}, began {began}, took {seen.seconds:.2f} s", style="dim")
    )
    node.add(Text(f"trace {seen.trace or '–'}", style="dim"))
    for turn in seen.turns:
        _turn(node, turn, call)
    if seen.answer is not None:
        node.add(_said("answer", seen.answer))
    if seen.error:
        node.add(_said("error", seen.error, "red"))
    if seen.parts:
        score = node.add(_said("score", ", ".join(f"{part.name} {part.value:g}" for part in seen.parts)))
        for part in seen.parts:
            if part.detail:
                score.add(_said(part.name, part.detail))
    for sample in seen.samples:
        low, high = sample.advantage_low, sample.advantage_high
        advantage = f"{low:+.4g}" if low == high else f"{low:+.4g} to {high:+.4g}"
        text = f"{sample.tokens} tokens, advantage {advantage}, into {sample.version}"
        text += "" if sample.committed else " (that step was never committed)"
        node.add(_line("sample", sample.id, text, bold=sample.id == asked))


def _turn(node: Tree, turn: TurnSeen, asked: str) -> None:
    sure = "–" if turn.mean_logprob is None else f"{turn.mean_logprob:.3f}"
    made = f"{turn.tokens} tokens by {', '.join(turn.versions) or '–'}, mean logprob {sure}"
    part = node.add(_line("turn", str(turn.number), made))
    part.add(_said("assistant", turn.text))
    for call in turn.calls:
        _call(part, call, call.id == asked)


def _call(part: Tree, call: CallSeen, asked: bool) -> None:
    style = "green" if call.status == "ok" else "red"
    node = part.add(_line("call", call.id, f"{call.name or 'malformed'}: {call.status}", bold=asked))
    for name, value in call.arguments.items():
        node.add(_said(name, str(value)))
    node.add(_said("result", call.content, style))
    for entry in call.audit:
        body = entry.body if isinstance(entry.body, dict) else {}
        told = {key: body[key] for key in ("decision", "rule", "reason", "status") if body.get(key)}
        text = ", ".join(f"{key} {value}" for key, value in told.items())
        line = f"{entry.log} {entry.number}: {entry.kind}" + (f" ({text})" if text else "")
        node.add(Text(clean(line), style="dim"))


def _step(root: Tree, trace: Trace) -> None:
    if trace.commit is not None:
        commit = trace.commit
        kept = "kept" if commit.kept else "no longer kept" if commit.checkpoint else "none"
        node = root.add(
            _line("version", commit.version, f"{commit.trained} rollouts trained, {commit.dropped} dropped")
        )
        node.add(Text(f"checkpoint {commit.checkpoint or '–'} ({kept}), queue position {commit.position}"))
        for weights in trace.weights:
            text = f"weights {weights.digest}, pushed with a gap of {weights.gap:.2g} to the trainer's probe"
            node.add(Text(text))


def _several(root: Tree, what: str, briefs: Sequence[Brief]) -> None:
    ends = Counter(brief.disposition or "not in the ledger" for brief in briefs)
    told = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    node = root.add(Text(clean(f"{what}: {len(briefs)}") + (f" ({told})" if told else ""), style="bold"))
    for brief in briefs[:LIMIT]:
        node.add(_line("rollout", brief.rollout, _fate(brief)))
    if len(briefs) > LIMIT:
        node.add(Text(f"… and {len(briefs) - LIMIT} more: --json shows all", style="dim"))


def _fate(brief: Brief) -> str:
    value = "no value" if brief.value is None else f"reward {brief.value:g}"
    end = brief.disposition or "not in the ledger"
    into = f" into {brief.version}" if brief.version else ""
    return f"{brief.outcome or 'no outcome'}, {value}; {end}{into}" + (
        f" ({brief.reason})" if brief.reason else ""
    )


def _line(kind: str, id: str, text: str, *, bold: bool = False) -> Text:
    line = Text()
    line.append(f"{kind} ", style="dim")
    line.append(clean(id), style="bold cyan" if bold else "cyan")
    line.append(f"  {clean(text)}")
    return line


def _said(who: str, text: str, style: str = "") -> Text:
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
    line = Text(f"{clean(who)}  ", style="dim")
    line.append(clean(cut), style=style)
    return line
