"""A user's own tasks: one small class with one method, `make`, that draws a question.

Role: from a drawn `Question` to everything that a task set must give. Neighbours: `config` holds the limits,
`pieces` reads the tokenizer's pieces; `type = "module:Class"` names the class in a configuration.
Invariants: the same (split, number) is the same task for ever; a question's key belongs to one split only,
so that no held-out question was ever trained on; the twin of a task has another answer.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import Field, model_validator

from rollwright.errors import ConfigError
from rollwright.plugins import PartConfig
from rollwright.tasks.base import Demonstration, Split, TaskSet
from rollwright.tasks.config import LimitsConfig
from rollwright.tasks.pieces import pieces_of
from rollwright.types import (
    AnswerEquals,
    AnyCheck,
    CallsSucceed,
    Environment,
    File,
    Json,
    Message,
    Task,
    ToolCall,
    TwinReplay,
)

DRAWS = 10_000
"""Draws after which a wanted question is taken not to exist."""
SAMPLES = 300
"""Train tasks that the tokenizer's pieces are read from."""
FIRST_SAMPLE = 20_000_000
"""Number of the first of them: apart from those of training and of the warm start."""
TEXT_ARGUMENT = {"python": "code", "sql": "query"}
"""Tool → the argument that a step's text is."""


@dataclass(frozen=True)
class Step:
    """One call of a scripted run, and what the tool says to it, to the letter."""

    tool: str
    call: str | Mapping[str, Json]
    """The code or the query, for `python` and `sql`; the arguments by name, for any tool."""
    told: str


@dataclass(frozen=True)
class Question:
    """One question as `OwnTasks.make` draws it."""

    ask: str
    answer: str
    names: tuple[str, ...] = ()
    """The words of `ask` that vary. With them each task gets a twin: the same question over other names and
    other data, on which the agent's calls have to lead to the right answer too, so that a guess wins
    nothing."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text of the files in the sandbox."""
    sql: str = ""
    """Statements that make the sandbox's database."""
    script: tuple[Step, ...] = ()
    """What a scripted run does; the warm start learns from it, mistakes included."""
    says: str | None = None
    """What the scripted run answers; `answer` where this is not given."""
    checks: tuple[AnyCheck, ...] = ()
    """Further checks, beyond those on the calls, the answer and the twin."""
    key: str = ""
    """Decides the split; `ask` where this is empty. It must follow from `ask`."""

    @property
    def environment(self) -> Environment:
        """What the sandbox holds."""
        files = tuple(File(path=path, text=text) for path, text in self.files.items())
        return Environment(files=files, sql=self.sql)

    @property
    def pattern(self) -> str:
        """The question with its names left open: equal for a question and its twin."""
        text = self.ask
        for number, name in enumerate(self.names):
            text = re.sub(rf"\b{re.escape(name)}\b", f"\0{number}\0", text)
        return text


class OwnTasks(PartConfig):
    """Base of a user's tasks: give `make`. Fields of the class are keys of the table `[tasks]`."""

    type: str = ""
    """`module:Class` of this class."""
    seed: int = 0
    """Another seed is another supply of tasks."""
    system: str = ""
    """The system message; empty: none."""
    tools: tuple[str, ...] = ("python",)
    """Tools that an agent may use; an empty list: none, the answer is the first turn."""
    heldout_every: int = Field(8, ge=2)
    """One question in this many is kept for the split `heldout`."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of one rollout."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"type": f"{cls.__module__}:{cls.__qualname__}", **value} if isinstance(value, dict) else value

    def make(self, rng: random.Random) -> Question:
        """A question; everything that varies is drawn from `rng` (and from nothing else)."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'make'")

    def build(self) -> TaskSet:
        """The task set.

        Raises:
            ConfigError: `make` gives no questions for both splits, or none that has a twin.
        """
        made = OwnTaskSet(self)
        made.check()
        return made


class OwnTaskSet:
    """The task set of an `OwnTasks`."""

    def __init__(self, config: OwnTasks) -> None:
        self.config = config
        self.name = type(config).__name__.lower()
        self._last: tuple[tuple[Split, int], Question, Task] | None = None

    def check(self, count: int = 20) -> None:
        """Draw a few tasks of each split, so that what is wrong is told before a run starts.

        Raises:
            ConfigError: no question for a split, no twin, or a question in both splits.
        """
        asked = {self.task("train", number).messages for number in range(count)}
        for number in range(count):
            task = self.task("heldout", number)
            if task.messages in asked:
                raise self._error(
                    f"asks {task.messages[-1].content!r} in both splits: the key must follow from `ask`"
                )
            self.demonstrate(task, number)

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0 of a split."""
        return self._made(split, number)[1]

    def demonstrate(self, task: Task, number: int) -> Demonstration | None:
        """The script that was drawn with `task`; None where it has none and tools are allowed."""
        _, _, split, index = task.id.split("/")
        question, _ = self._made("heldout" if split == "heldout" else "train", int(index))
        if self.config.tools and not question.script and question.says is None:
            return None
        calls = tuple(
            ToolCall(id=f"{task.id}/{number}/{i}", name=step.tool, arguments=self._arguments(step))
            for i, step in enumerate(question.script)
        )
        said = question.answer if question.says is None else question.says
        return Demonstration(calls=calls, observations=tuple(s.told for s in question.script), answer=said)

    def pieces(self) -> tuple[str, ...]:
        """Text pieces that a small tokenizer should know as one token, read from sample train tasks."""
        return self._pieces

    @cached_property
    def _pieces(self) -> tuple[str, ...]:
        return pieces_of([self._texts(FIRST_SAMPLE + number) for number in range(SAMPLES)])

    def _texts(self, number: int) -> list[str]:
        """Every text that a scripted run of a train task holds."""
        task = self.task("train", number)
        texts = [message.content for message in task.messages]
        script = self.demonstrate(task, number)
        if script is not None:
            texts += [f"{c.name} {v}" for c in script.calls for v in c.arguments.values()]
            texts += [*script.observations, script.answer]
        return texts

    def _arguments(self, step: Step) -> dict[str, Json]:
        if step.tool not in self.config.tools:
            raise self._error(f"scripts a call of {step.tool!r}, its tools are {list(self.config.tools)}")
        if not isinstance(step.call, str):
            return dict(step.call)
        if step.tool not in TEXT_ARGUMENT:
            raise self._error(f"gives text to {step.tool!r}: give the arguments by name, as a dict")
        return {TEXT_ARGUMENT[step.tool]: step.call}

    def _made(self, split: Split, number: int) -> tuple[Question, Task]:
        """The question and the task of a number."""
        if self._last is None or self._last[0] != (split, number):
            rng = random.Random(f"{self.name}/{self.config.seed}/{split}/{number}")
            question = self._draw(rng, split)
            self._last = ((split, number), question, self._task(question, rng, split, number))
        return self._last[1:]

    def _draw(self, rng: random.Random, split: Split) -> Question:
        """The first drawn question that belongs to the split."""
        for _ in range(DRAWS):
            question = self.config.make(rng)
            missing = [name for name in question.names if name not in question.ask]
            if missing:
                raise self._error(f"names {missing[0]!r}, which the question {question.ask!r} does not hold")
            if self._held_out(question) == (split == "heldout"):
                return question
        raise self._error(
            f"draws no question for the split '{split}' in {DRAWS} tries: "
            "it needs more different questions, or a smaller heldout_every"
        )

    def _held_out(self, question: Question) -> bool:
        """Whether its key belongs to the split `heldout`; a hash decides."""
        key = hashlib.blake2b((question.key or question.ask).encode(), digest_size=8).digest()
        return int.from_bytes(key) % self.config.heldout_every == 0

    def _task(self, question: Question, rng: random.Random, split: Split, number: int) -> Task:
        checks: list[AnyCheck] = [CallsSucceed()] if self.config.tools else []
        checks += [AnswerEquals(expected=question.answer), *question.checks]
        if question.names:
            checks.append(self._twin(question, rng))
        user = Message(role="user", content=question.ask)
        system = (Message(role="system", content=self.config.system),) if self.config.system else ()
        return Task(
            id=f"{self.name}/{self.config.seed}/{split}/{number}",
            set=self.name,
            messages=(*system, user),
            tools=self.config.tools,
            checks=tuple(checks),
            environment=question.environment,
            limits=self.config.limits.build(),
        )

    def _twin(self, question: Question, rng: random.Random) -> TwinReplay:
        """The same question over other names and data, with another answer."""
        for _ in range(DRAWS):
            other = self.config.make(rng)
            apart = not set(other.names) & set(question.names) and other.answer != question.answer
            if apart and other.pattern == question.pattern:
                return TwinReplay(
                    environment=other.environment,
                    renamed=dict(zip(question.names, other.names, strict=True)),
                    expected=other.answer,
                )
        raise self._error(
            f"draws no twin of {question.ask!r} in {DRAWS} tries: the same words with other names "
            f"than {list(question.names)} and another answer"
        )

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"tasks '{self.config.type}': make() {what}")
