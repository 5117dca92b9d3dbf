"""What the controls of `learning.py` swap in: an algorithm without a true reward, tasks without a tool."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import msgspec

from rollwright.algo.base import Algorithm
from rollwright.algo.config import GrpoConfig
from rollwright.tasks.base import Demonstration, Split, TaskSet
from rollwright.tasks.config import RecordsConfig
from rollwright.types import AnswerEquals, Group, Sample, Scored, Task


@dataclass(frozen=True)
class ShuffledRewards:
    """Another algorithm on groups whose scores were dealt out anew among their members."""

    inner: Algorithm

    def samples(self, group: Group) -> list[Sample]:
        """As `inner`, on shuffled scores; the same group is always shuffled alike."""
        scores = [member.score for member in group.members]
        random.Random(group.id).shuffle(scores)
        members = tuple(
            Scored(rollout=member.rollout, score=score)
            for member, score in zip(group.members, scores, strict=True)
        )
        return self.inner.samples(msgspec.structs.replace(group, members=members))


class Shuffled(GrpoConfig):
    """GRPO with the rewards shuffled within each group."""

    type: Literal["controls:Shuffled"] = "controls:Shuffled"  # type: ignore[assignment]

    def build(self) -> Algorithm:
        """The algorithm."""
        return ShuffledRewards(super().build())


@dataclass(frozen=True)
class ToollessTasks:
    """The same questions, with no tool allowed; only the answer is checked."""

    inner: TaskSet
    name: str = "no-tool"

    def task(self, split: Split, number: int) -> Task:
        """Task `number` without its tool."""
        task = self.inner.task(split, number)
        checks = tuple(check for check in task.checks if isinstance(check, AnswerEquals))
        return msgspec.structs.replace(task, tools=(), checks=checks)

    def demonstrate(self, task: Task, number: int) -> Demonstration | None:
        """None: nothing is shown without a tool."""
        return None

    def pieces(self) -> tuple[str, ...]:
        """Those of the tasks with a tool."""
        return self.inner.pieces()


class NoTool(RecordsConfig):
    """`records` with the tool disabled."""

    type: Literal["controls:NoTool"] = "controls:NoTool"  # type: ignore[assignment]

    def build(self) -> TaskSet:
        """The task set."""
        return ToollessTasks(super().build())
