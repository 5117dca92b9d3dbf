"""Calls held to their schemas while decoding: in a run, with the embedded engine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from in_process import ran

from rollwright.agents.calls import parse
from rollwright.archive.reader import opened
from rollwright.config import RunConfig, load
from rollwright.errors import ConfigError, MissingExtra
from rollwright.events import Metrics, read_events
from rollwright.monitor.engine import COMPLIANCE
from rollwright.run import preflight
from rollwright.run.folder import RunFolder
from rollwright.tools.registry import ToolRegistry
from rollwright.tools.sql import SqlTool
from rollwright.types import Rollout, ToolSpec

CLUMSY = (
    "tasks.limits={max_turns=6, max_tokens=160, turn_tokens=40}",
    "warmstart={steps=12, batch=8}",
    "trainer.sft_lr=1e-2",
    "evaluation={tasks=8, concurrency=8}",
)
"""A policy that likes to call and has not learnt how."""


def rollouts(folder: RunFolder) -> list[Rollout]:
    with closing(opened(folder.rollouts)) as archive:
        names = [line.rollout for line in archive.lines()]
        return [kept.scored.rollout for _, kept, _ in archive.whole(names)]


def problems(folder: RunFolder) -> tuple[int, list[str]]:
    """How many calls there were, and what was wrong with them."""
    registry, count, found = ToolRegistry.installed(), 0, list[str]()
    specs = registry.specs(("sql",))
    for rollout in rollouts(folder):
        for turn in rollout.turns:
            for each in parse(turn.text, specs, rollout="r", turn=0).calls:
                count += 1
                wrong = each.problem or registry.problem(each.call.name, each.call.arguments)
                found += [f"{wrong}: {turn.text!r}"] if wrong else []
    return count, found


def compliance(folder: RunFolder) -> list[float]:
    told = (each.event for each in read_events(folder.path))
    return [
        event.values[COMPLIANCE]
        for event in told
        if isinstance(event, Metrics) and COMPLIANCE in event.values
    ]


@pytest.mark.needs("grammar")
def test_a_policy_that_cannot_call_makes_only_valid_calls(tmp_path: Path) -> None:
    free = ran(tmp_path / "free", *CLUMSY)
    count, found = problems(free)
    assert len(found) > 5 and not compliance(free), f"{count} calls, all right: the test shows nothing"
    held = ran(tmp_path / "held", *CLUMSY, "agent.calls=enforced")
    count, found = problems(held)
    assert count > 5 and not found, found[:5]
    assert compliance(held) and set(compliance(held)) == {1.0}


HELD = ("agent.calls=enforced", "evaluation.tasks=8")


def checked(config: RunConfig) -> None:
    preflight.calls(config, preflight.taskset(config))


def test_without_the_extra_a_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"agent\.calls.*rollwright\[grammar\]"):
        preflight.check(load([], HELD))
    with pytest.raises(MissingExtra):
        preflight.evaluation(load([], []), ["agent.calls=enforced"])
    checked(load([], []))
    checked(load([], [*HELD, 'engine={type="remote", url="http://127.0.0.1:1"}']))  # the server's to say


@pytest.mark.needs("grammar")
def test_tools_that_cannot_be_held_to_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(load([], HELD))

    class Unique(SqlTool):
        spec = ToolSpec(
            name="sql",
            description="",
            parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        )

    monkeypatch.setattr(ToolRegistry, "installed", lambda: ToolRegistry([Unique()]))
    with pytest.raises(ConfigError, match=r"agent\.calls = 'enforced'.*sql.*uniqueItems.*'free'"):
        checked(load([], HELD))
