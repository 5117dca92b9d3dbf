"""Other people's tasks from end to end: scripted runs of the example and of reasoning-gym, with real tools,
real sandboxes and the real reward."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollwright.agents.calls import render
from rollwright.agents.config import AgentConfig
from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.buffer.memory import MemoryStore
from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.events import ListSink
from rollwright.guard.audit import AuditLog
from rollwright.guard.chain import GuardChain
from rollwright.guard.policy import AllowList
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.reward.config import RewardConfig
from rollwright.rollout.config import RolloutConfig
from rollwright.rollout.factory import RolloutFactory
from rollwright.sandbox.local import ProcessProvider
from rollwright.tasks.base import Demonstration, TaskSet
from rollwright.tasks.config import GymConfig, LimitsConfig
from rollwright.testing.archives import NoArchive
from rollwright.testing.scripted_engine import ScriptedEngine
from rollwright.tools.door import ToolDoor
from rollwright.tools.registry import ToolRegistry
from rollwright.types import Identity, Outcome, PolicyVersion, Sampling, Scored, ScoredBy, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task" / "sales.toml"
Changed = Callable[[Task, Demonstration], Demonstration]


async def played(folder: Path, made: TaskSet, tasks: list[Task], change: Changed) -> list[Scored]:
    """One rollout of each task, by a policy that says what its demonstration says after `change`."""
    codec = PieceTokenizer(made.pieces(), CONTROL)
    template, registry, clock = PieceTemplate(codec), ToolRegistry.installed(), SystemClock()
    said: dict[tuple[int, ...], list[list[int]]] = {}
    for task in tasks:
        script = made.demonstrate(task, 0)
        assert script is not None
        script = change(task, script)
        specs = registry.specs(task.tools)
        turns = [template.say_call(render(call, specs[0])).tolist() for call in script.calls]
        start = tuple(template.start(task.messages, specs).tolist())
        said[start] = [*turns, template.say_answer(script.answer).tolist()]

    def policy(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        (start,) = (start for start in said if prompt[: len(start)] == start)
        turn = codec.decode(prompt[len(start) :]).count("<|assistant|>")
        return said[start][turn], [-0.5] * len(said[start][turn])

    engine = ScriptedEngine(policy, version=PolicyVersion(run="run"), vocab=codec.size)
    sandboxes = ProcessProvider(folder / "sandboxes", unsafe=True, max_live=16)
    audit = AuditLog(folder / "audit.jsonl", clock)
    factory = RolloutFactory(
        tasks=made,
        agent=AgentConfig().build(),
        engine=engine,
        door=ToolDoor(registry, GuardChain([AllowList()]), audit, clock=clock, events=ListSink()),
        sandboxes=sandboxes,
        reward=RewardConfig().build(sandboxes, clock),
        ledger=MemoryStore(100),
        archive=NoArchive(),
        codec=codec,
        template=template,
        clock=clock,
        events=ListSink(),
        config=RolloutConfig(concurrency=4),
        identity=Identity(run="run"),
        rng=random.Random(0),
    )
    await sandboxes.start()
    await engine.start()
    try:
        return await factory.evaluate(tasks, Sampling(), label="played")
    finally:
        await engine.close()
        await sandboxes.close()
        audit.close()


def differing(made: TaskSet, count: int) -> list[Task]:
    """Held-out tasks whose questions differ: by its question the policy knows which script to follow."""
    found = {task.messages: task for task in (made.task("heldout", number) for number in range(200))}
    return list(found.values())[:count]


def as_it_is(task: Task, script: Demonstration) -> Demonstration:
    return script


async def test_scripts_of_the_example_hear_what_they_say_and_score_where_they_are_right(
    tmp_path: Path,
) -> None:
    made = load([EXAMPLE]).tasks.build()  # type: ignore[attr-defined]
    tasks = differing(made, 16)
    right = 0
    for task, scored in zip(tasks, await played(tmp_path, made, tasks, as_it_is), strict=True):
        script, rollout = made.demonstrate(task, 0), scored.rollout
        heard = [result.content for turn in rollout.turns for result in turn.results]
        assert heard == list(script.observations)  # to the letter
        asked = task.messages[-1].content.rstrip("?").split(" sold in ")
        whole = all(name in script.calls[0].arguments["code"] for name in asked)
        assert scored.score.value == float(whole), (script, scored.score)
        right += whole
    assert 0 < right < 16


async def test_a_right_answer_without_the_right_call_fails_on_the_twin(tmp_path: Path) -> None:
    made = load([EXAMPLE]).tasks.build()  # type: ignore[attr-defined]
    tasks = differing(made, 8)

    def guess(task: Task, script: Demonstration) -> Demonstration:
        answer = next(check.expected for check in task.checks if hasattr(check, "expected"))
        call = replace(script.calls[0], arguments={"code": f"print({answer})"})
        return replace(script, calls=(call,), answer=answer)

    assert [s.score.value for s in await played(tmp_path, made, tasks, guess)] == [0.0] * 8


@pytest.mark.needs("reasoning-gym")
@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "word_sorting"])
async def test_reasoning_gym_scores_what_a_rollout_answers(tmp_path: Path, name: str) -> None:
    made = GymConfig(dataset=name, heldout=8, limits=LimitsConfig(max_tokens=512, turn_tokens=128)).build()
    tasks = [made.task("heldout", number) for number in range(8)]

    def half(task: Task, script: Demonstration) -> Demonstration:
        return script if tasks.index(task) % 2 else replace(script, answer=f"not {script.answer}")

    found = await played(tmp_path, made, tasks, half)
    assert {scored.rollout.outcome for scored in found} == {Outcome.ANSWERED}
    assert [scored.score.value for scored in found] == [0.0, 1.0] * 4
    assert {part.name for scored in found for part in scored.score.parts} == {"scored_by"}


@pytest.mark.needs("reasoning-gym")
async def test_a_check_that_names_a_module_imports_nothing(tmp_path: Path) -> None:
    tasks = GymConfig(heldout=2).build()
    attack = ScoredBy(scorer="this:s", arguments={})
    task = replace(tasks.task("heldout", 0), checks=(attack,))
    (scored,) = await played(tmp_path, tasks, [task], as_it_is)
    assert scored.score.value is None and "registered scorer" in scored.score.reason
    assert "this" not in sys.modules
