"""The scripted runs of a task set, tried before anything is trained on them.

Role: finds what is wrong with the tasks themselves. `on_paper` counts: arguments against the tool's schema,
turns and rows against the limits; it needs no sandbox and takes a moment, so preflight does it. `played`
makes the calls through the door, in real sandboxes, and asks the reward. Neighbours: preflight, `assess`; the
task set scripts. Invariants: nothing of the policy takes part, so what is found is the tasks' fault; each
finding is one line that names task, field, what was given and what was expected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollwright.agents.base import ScriptTemplate
from rollwright.agents.calls import parse, render
from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.clock import Clock
from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.events import TraceContext
from rollwright.guard.audit import AuditLog
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.plugins import buildable
from rollwright.reward.base import Reward
from rollwright.sandbox.base import Sandbox, SandboxProvider
from rollwright.tasks.base import Demonstration, Split, TaskSet
from rollwright.tools.base import Action
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.types import (
    REPLAYED,
    AnswerEquals,
    Finish,
    Identity,
    Outcome,
    Rollout,
    Score,
    Task,
    ToolResult,
    Turn,
    TwinReplay,
)
from rollwright.values import shown

ON_PAPER = 32
"""Tasks of each split that are counted."""
PLAYED = 8
"""Tasks of each split that are played."""
RARE = 0.25
"""Share of scripts up to which one that doesn't fit into the limits is worth a warning, not a refusal."""
SPLITS: tuple[Split, ...] = ("train", "heldout")


class Faulty(ConfigError):
    """The tasks themselves are wrong, whatever policy tries them; `reasons` has one line each."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        more = f" (and {len(reasons) - 1} more: rollwright assess lists them)" if reasons[1:] else ""
        super().__init__(f"tasks '{name}', {reasons[0]}{more}")
        self.reasons = tuple(reasons)


@dataclass
class Findings:
    """What was found, the same thing once."""

    problems: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Kind → the first line of that kind, and how often."""
    warnings: list[str] = field(default_factory=list)
    looked_at: int = 0
    """Scripts."""

    def problem(self, kind: str, text: str) -> None:
        """One more of a kind."""
        first, count = self.problems.get(kind, (text, 0))
        self.problems[kind] = (first, count + 1)

    def lines(self) -> list[str]:
        """The problems, one line each."""
        return [
            text + (f" ({count} like this in {self.looked_at} scripts)" if count > 1 else "")
            for text, count in self.problems.values()
        ]


@dataclass(frozen=True)
class _Part:
    """A task with its script; `name` is how a finding calls it."""

    name: str
    task: Task
    script: Demonstration


def on_paper(config: RunConfig, tasks: TaskSet, count: int = ON_PAPER) -> Findings:
    """What can be seen without a sandbox, of the first `count` tasks of each split.

    Raises:
        PluginError: a task names a tool that doesn't exist.
    """
    found, registry = Findings(), ToolRegistry.installed()
    template = PieceTemplate(PieceTokenizer(tasks.pieces(), CONTROL))
    over: dict[str, list[str]] = {}
    for part in _parts(config, tasks, count):
        found.looked_at += 1
        sound = True
        for problem in _calls(part, registry):
            sound = False
            found.problem(problem.partition(": ")[2][:20], problem)
        if isinstance(twin := _twin(part.task), TwinReplay) and not _reachable(part.task, twin):
            found.problem("twin", f"{part.name}: {_no_twin(part.task)}")
        if sound:
            for key, text in _sizes(part, template, registry, config.model.context):
                over.setdefault(key, []).append(text)
    for key, texts in over.items():
        if key == "context" or len(texts) > RARE * found.looked_at:
            found.problems[key] = (texts[0], len(texts))
        else:
            found.warnings.append(f"{texts[0]} ({len(texts)} of {found.looked_at} scripts)")
    return found


def _parts(config: RunConfig, tasks: TaskSet, count: int) -> Iterator[_Part]:
    """Scripted tasks; fewer held-out ones where an evaluation takes fewer."""
    for split in SPLITS:
        for number in range(count if split == "train" else min(count, config.evaluation.tasks)):
            task = tasks.task(split, number)
            script = tasks.demonstrate(task, number)
            if script is not None:
                yield _Part(f"{split} task {number}", task, script)


def _calls(part: _Part, registry: ToolRegistry) -> Iterator[str]:
    """What is wrong with calls and answer of a script."""
    specs = registry.specs(part.task.tools)
    for number, call in enumerate(part.script.calls):
        where = f"{part.name}: script[{number}].call"
        if call.name not in part.task.tools:
            yield f"{where}: calls '{call.name}', the task's tools are {list(part.task.tools)}"
        elif problem := registry.problem(call.name, call.arguments):
            properties = registry.specs((call.name,))[0].parameters.get("properties", {})
            yield f"{where}: {problem}; the tool '{call.name}' takes {', '.join(properties) or 'nothing'}"
    if len(part.script.observations) != len(part.script.calls):
        yield (
            f"{part.name}: script: {len(part.script.calls)} calls and {len(part.script.observations)} "
            "observations: say what each call is told"
        )
    if parse(part.script.answer, specs, rollout="r", turn=0).calls:
        yield f"{part.name}: says: {shown(part.script.answer)} reads as a call: an answer holds no <call>"


def _sizes(
    part: _Part, template: ScriptTemplate, registry: ToolRegistry, context: int
) -> Iterator[tuple[str, str]]:
    """(limit, line) for each limit that a script goes beyond; tokens are those of the run's tokenizer."""
    limits, specs, script = part.task.limits, registry.specs(part.task.tools), part.script
    by_name = {spec.name: spec for spec in specs}
    turns = [template.say_call(render(call, by_name[call.name])) for call in script.calls]
    turns.append(template.say_answer(script.answer))
    longest = max(range(len(turns)), key=lambda number: len(turns[number]))
    if len(turns[longest]) > limits.turn_tokens:
        what = "says" if longest == len(script.calls) else f"script[{longest}].call"
        yield (
            "turn_tokens",
            f"{part.name}: {what}: a turn of {len(turns[longest])} tokens, turns may have "
            f"{limits.turn_tokens}: raise tasks.limits.turn_tokens",
        )
    if len(turns) > limits.max_turns:
        yield (
            "max_turns",
            f"{part.name}: script: {len(turns)} turns with the answer, a rollout may have "
            f"{limits.max_turns}: raise tasks.limits.max_turns",
        )
    row = len(template.start(part.task.messages, specs)) + sum(map(len, turns))
    row += sum(len(template.observation([told], closed=True)) for told in script.observations)
    if row > context:
        yield (
            "context",
            f"{part.name}: script: a row of {row} tokens, model.context = {context} holds fewer: "
            "raise model.context and tasks.limits.max_tokens, or shorten what tools say",
        )
    elif row > limits.max_tokens:
        yield (
            "max_tokens",
            f"{part.name}: script: a row of {row} tokens, rows may have {limits.max_tokens}: "
            "raise tasks.limits.max_tokens",
        )


def _twin(task: Task) -> TwinReplay | None:
    return next((check for check in task.checks if isinstance(check, TwinReplay)), None)


def _reachable(task: Task, twin: TwinReplay) -> bool:
    """Whether any rollout can be right on the twin: by calls that are replayed, or by a name."""
    right = [check.expected for check in task.checks if isinstance(check, AnswerEquals)]
    named = any(twin.renamed.get(expected) == twin.expected for expected in right)
    return named or bool(set(task.tools) & set(REPLAYED))


def _no_twin(task: Task) -> str:
    return (
        f"has a twin, and its tools are {list(task.tools)}: only calls of {' and '.join(REPLAYED)} are "
        "replayed on a twin, so no rollout can be right; leave out the twin (`names`), or give such a tool"
    )


async def played(
    config: RunConfig, tasks: TaskSet, folder: Path, clock: Clock, count: int = PLAYED
) -> Findings:
    """Play the scripts of `count` tasks of each split: their calls through the door, in sandboxes that are
    gone afterwards, scored by the reward of `config`. `folder` takes sandboxes and audit.

    Raises:
        SandboxUnavailable: as the provider's `start`.
    """
    found = Findings()
    parts = list(_parts(config, tasks, count))
    if not parts:
        return found
    agents: SandboxProvider = buildable(config.sandbox, "sandbox").build(folder / "rehearsal", clock=clock)
    graders: SandboxProvider = buildable(config.sandbox, "sandbox").build(folder / "grader", clock=clock)
    audit = AuditLog(folder / "rehearsal.jsonl", clock)
    door = ToolDoor(ToolRegistry.installed(), GuardChain([AllowList()]), audit, clock=clock)
    try:
        await agents.start()
        await graders.start()
        stage = _Stage(agents, door, buildable(config.reward, "reward").build(graders, clock), clock)
        width = min(config.rollout.concurrency, agents.capacity)
        slots = asyncio.Semaphore(max(1, min(width, PLAYED)))
        scenes = await asyncio.gather(*(stage.play(part, slots) for part in parts))
    finally:
        await agents.close()
        await graders.close()
        audit.close()
    found.looked_at = len(parts)
    for part, scene in zip(parts, scenes, strict=True):
        _heard(part, scene, found)
    _rewarded(parts, scenes, config.rollout.success, found)
    return found


@dataclass(frozen=True)
class _Scene:
    """What came of one script."""

    results: tuple[ToolResult, ...]
    score: Score


@dataclass(frozen=True)
class _Stage:
    """Where scripts are played."""

    sandboxes: SandboxProvider
    door: ToolDoor
    reward: Reward
    clock: Clock

    async def play(self, part: _Part, slots: asyncio.Semaphore) -> _Scene:
        """One script in a sandbox of its own."""
        async with slots:
            sandbox = await self.sandboxes.create(part.task.environment, owner=part.task.id)
            try:
                return await self._play(part, sandbox)
            finally:
                await sandbox.kill()

    async def _play(self, part: _Part, sandbox: Sandbox) -> _Scene:
        trace = TraceContext.new()
        identity = Identity(
            run="rehearsal", job="eval", task=part.task.id, rollout=part.task.id, trace=trace.trace
        )
        turns, results = [], []
        for number, call in enumerate(part.script.calls):
            action = Action(
                call=call,
                identity=identity,
                task=part.task,
                sandbox=sandbox,
                trace=trace,
                timeout=part.task.limits.tool_seconds,
                history=part.script.calls[:number],
            )
            result = await self.door.invoke(action)
            results.append(result)
            turns.append(
                Turn(row=0, start=0, end=0, text="", finish=Finish.STOP, calls=(call,), results=(result,))
            )
        turns.append(Turn(row=0, start=0, end=0, text=part.script.answer, finish=Finish.STOP))
        rollout = Rollout(
            identity=identity,
            rows=(),
            turns=tuple(turns),
            outcome=Outcome.ANSWERED,
            answer=part.script.answer.strip(),
        )
        return _Scene(tuple(results), await self.reward.score(part.task, rollout, sandbox))


def _heard(part: _Part, scene: _Scene, found: Findings) -> None:
    """Compare what the script is told with what the tools said."""
    for number, (call, told, result) in enumerate(
        zip(part.script.calls, part.script.observations, scene.results, strict=False)
    ):
        if told != result.content:
            found.problem(
                "told",
                f"{part.name}: script[{number}].told: given {shown(told)}, the tool '{call.name}' says to "
                f"{_call(call.arguments)}: {shown(result.content)} ({result.status.value}): "
                "give what the tool says, to the letter",
            )
            return  # what comes after hangs on it


def _rewarded(parts: Sequence[_Part], scenes: Sequence[_Scene], success: float, found: Findings) -> None:
    """Look whether right answers are worth something. A script may be right by luck, so single ones that fail
    are a warning only."""
    right: list[tuple[_Part, Score]] = []
    won = False
    for part, scene in zip(parts, scenes, strict=True):
        if scene.score.value is None:
            found.problem("unscorable", f"{part.name}: cannot be scored: {scene.score.reason}")
            continue
        good = scene.score.value >= success - 1e-9
        won = won or good
        if _says_it(part):
            right.append((part, scene.score))
    failed = [(part, score) for part, score in right if (score.value or 0.0) < success - 1e-9]
    if not failed:
        if parts and not won and not found.problems:
            found.warnings.append(
                f"none of {len(parts)} scripts answers right: a policy that learns from them finds nothing"
            )
        return
    part, score = failed[0]
    why = next((f"{p.name}: {p.detail}" for p in score.parts if p.value < 1), "no check failed")
    line = (
        f"{part.name}: says: {shown(part.script.answer)} is the right answer, and its reward is "
        f"{score.value:g}, {success:g} expected ({why})"
    )
    if len(failed) == len(right):
        found.problems["right"] = (line + _hint(part), len(failed))
    else:
        found.warnings.append(f"{line}; {len(failed)} of {len(right)} right answers fail so")


def _says_it(part: _Part) -> bool:
    """Whether the script gives the answer that the task asks for."""
    from rollwright.reward.text import same

    wanted = [check.expected for check in part.task.checks if isinstance(check, AnswerEquals)]
    return bool(wanted) and all(same(part.script.answer, expected) for expected in wanted)


def _hint(part: _Part) -> str:
    """What to do about a twin on which nothing can be right."""
    if _twin(part.task) is None or any(call.name in REPLAYED for call in part.script.calls):
        return ""
    replayed = " and ".join(REPLAYED)
    return f"; only calls of {replayed} are replayed on a twin: script such calls, or leave out `names`"


def _call(arguments: dict[str, object]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in arguments.items()) or "no arguments"
