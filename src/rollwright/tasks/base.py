"""The task-set seam: a numbered, repeatable supply of tasks.

Role: where tasks come from. Neighbours: the factory draws from it, the warm start asks for demonstrations.
Invariants: the same (split, number) is the same task for ever; splits share nothing that could be
memorised.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from rollwright.types import Record, Task, ToolCall

Split = Literal["train", "heldout"]


class Demonstration(Record, frozen=True, kw_only=True):
    """A scripted run: the calls to make in order, what the tools answer, then the answer."""

    calls: tuple[ToolCall, ...]
    answer: str
    observations: tuple[str, ...] = ()
    """What the model is told after each call, exactly as the real tools tell it."""


class TaskSet(Protocol):
    """A named supply of tasks."""

    name: str

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0 of a split."""

    def demonstrate(self, task: Task, number: int) -> Demonstration | None:
        """A scripted run of `task` by `number`-seeded habits (good and bad); None where the set has no
        script."""

    def pieces(self) -> tuple[str, ...]:
        """Text pieces that a small tokenizer should know as one token."""


@runtime_checkable
class Warns(Protocol):
    """A task set that can say what is no error but keeps a policy from learning; giving this is optional."""

    def warnings(self) -> tuple[str, ...]:
        """One line each."""
