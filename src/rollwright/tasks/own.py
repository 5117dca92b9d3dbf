"""A user's own tasks: one small class with one method, `make`, that draws a question.

Role: from a drawn `Question` to everything that a task set must give. Neighbours: `question` has what `make`
gives and looks at it, `config` holds the limits, `pieces` reads the tokenizer's pieces; `type =
"module:Class"` names the class in a configuration. Invariants: the same (split, number) is the same task for
ever; a question's key belongs to one split only, so that no held-out question was ever trained on; the twin
of a task has another answer; whatever `make` does wrong is one line.
"""

from __future__ import annotations

import hashlib
import random
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from rollwright.errors import ConfigError, RollwrightError
from rollwright.plugins import PartConfig
from rollwright.tasks.base import Demonstration, Split, TaskSet
from rollwright.tasks.config import LimitsConfig
from rollwright.tasks.pieces import pieces_of
from rollwright.tasks.question import Question, Step, Wrong, checked, refused_sql, told, unwritable
from rollwright.types import (
    REPLAYED,
    AnswerEquals,
    AnyCheck,
    CallsSucceed,
    Json,
    Message,
    Task,
    ToolCall,
    TwinReplay,
)
from rollwright.wire import decode, encode

__all__ = ["OwnTaskSet", "OwnTasks", "Question", "Step"]

SPLITS: tuple[Split, ...] = ("train", "heldout")
DRAWS = 10_000
"""Draws after which a wanted question is taken not to exist."""
SAMPLES = 300
"""Train tasks that the tokenizer's pieces are read from."""
FIRST_SAMPLE = 20_000_000
"""Number of the first of them: apart from those of training and of the warm start."""
TEXT_ARGUMENT = {"python": "code", "sql": "query"}
"""Tool → the argument that a step's text is."""
AGAIN = 5
"""Tasks of each split that are drawn twice, to see whether `make` repeats itself."""
HELDOUT_SAMPLES = 60
"""Held-out tasks whose names are compared with those of train tasks."""
UNSEEN = 0.25
"""Share of held-out names beyond which names that no train task has are worth a warning."""
FEW = 0.2
"""Share of different questions among the samples below which there are few."""


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

    @model_validator(mode="after")
    def _kept(self) -> Self:
        """A run keeps its configuration in files."""
        for name in type(self).model_fields:
            odd = unwritable(getattr(self, name))
            if odd is not None:
                raise ValueError(
                    f"its field '{name}' holds {told(odd)}, which TOML and JSON cannot keep: "
                    "use numbers, text, true or false, lists or tables of them, and make the rest in `make`"
                )
        return self

    def make(self, rng: random.Random) -> Question:
        """A question; everything that varies is drawn from `rng` (and from nothing else)."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'make'")

    def build(self) -> TaskSet:
        """The task set.

        Raises:
            ConfigError: `make` raises, gives something that is no question, no questions for both splits, or
                none that has a twin.
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
            ConfigError: `make` is missing, raises, gives something that is no question or another one the
                second time; no question for a split, no twin, or a question in both splits.
        """
        if type(self.config).make is OwnTasks.make:
            raise ConfigError(
                f"tasks '{self.config.type}': the class has no method 'make': "
                "give it one, `def make(self, rng: random.Random) -> Question`"
            )
        asked = set()
        for number in range(count):
            asked.add(self._sound("train", number).messages)
        for number in range(count):
            task = self._sound("heldout", number)
            if task.messages in asked:
                raise self._error(
                    f"asks {told(task.messages[-1].content)} in both splits: the key must follow from `ask`"
                )
        for split in SPLITS:
            for number in reversed(range(min(AGAIN, count))):
                self._repeats(split, number)

    def _sound(self, split: Split, number: int) -> Task:
        """A task that can be stored, with its script."""
        question, task = self._made(split, number)
        try:
            stored = decode(Task, encode(task))
        except (RollwrightError, TypeError, ValueError, NotImplementedError) as error:
            raise self._error(f"gave what cannot be stored: {error}") from error
        if stored != task:
            raise self._error("gave what is not the same once it is stored: give plain text and numbers")
        if question.sql and (why := refused_sql(question.sql)):
            raise self._error(f"gave sql that SQLite refuses ({why}): {told(question.sql)}")
        script = self.demonstrate(task, number)
        try:
            encode(script)
        except (RollwrightError, TypeError, ValueError, NotImplementedError) as error:
            raise self._error(f"gave a script whose arguments are not JSON: {error}") from error
        return task

    def _repeats(self, split: Split, number: int) -> None:
        """Refuse a `make` that gives another question for the same random numbers."""
        self._last = None
        one = self._made(split, number)
        self._last = None
        two = self._made(split, number)
        if one != two:
            raise self._error("gave two different questions for one number: draw from rng only")

    def warnings(self) -> tuple[str, ...]:
        """What is no error but keeps a policy from learning: held-out names that no train task has, few
        different questions."""
        found, half = [], SAMPLES - HELDOUT_SAMPLES
        drawn = [sample.question for sample in self._samples]
        known = {name for question in drawn[:half] for name in question.names}
        unseen, share = _unseen(known, [self._made("heldout", n)[0] for n in range(HELDOUT_SAMPLES)])
        _, chance = _unseen(known, drawn[half:])  # what a train task has that those samples don't
        if unseen and share - chance > UNSEEN:
            found.append(
                f"tasks '{self.config.type}': {share:.0%} of the names in held-out questions occur in no "
                f"train question ({', '.join(unseen[:3])}, …): a policy from nothing cannot write "
                "words that it never saw; let names recur and hold out their combinations"
            )
        different = len({question.ask for question in drawn})
        if different < FEW * len(drawn):
            found.append(
                f"tasks '{self.config.type}': only {different} different questions in {len(drawn)} draws: "
                "they can be learnt by heart"
            )
        return tuple(found)

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
        return pieces_of([sample.texts for sample in self._samples])

    @cached_property
    def _samples(self) -> list[_Sample]:
        return [self._sample(FIRST_SAMPLE + number) for number in range(SAMPLES)]

    def _sample(self, number: int) -> _Sample:
        """A train task with every text that a scripted run of it holds."""
        question, task = self._made("train", number)
        texts = [message.content for message in task.messages]
        script = self.demonstrate(task, number)
        if script is not None:
            texts += [f"{c.name} {v}" for c in script.calls for v in c.arguments.values()]
            texts += [*script.observations, script.answer]
        return _Sample(question, texts)

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

    def _make(self, rng: random.Random) -> Question:
        """What `make` gives; what it prints goes to standard error, where it is in no program's way.

        Raises:
            ConfigError: it raised, or gave something that is no question.
        """
        try:
            with redirect_stdout(sys.stderr):
                made: object = self.config.make(rng)
            return checked(made)
        except Wrong as error:
            raise self._error(str(error)) from error
        except RollwrightError:
            raise
        except Exception as error:  # boundary: a user's code, which may fail in any way
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._error(f"raised {what} ({self._place(error)})") from error

    def _place(self, error: Exception) -> str:
        """File and line of an error: the last ones in the file of the class, where it came from there."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(self.config).__module__), "__file__", None)
        own = [frame for frame in frames if frame.filename == file]
        frame = (own or frames)[-1]
        return f"{Path(frame.filename).name}:{frame.lineno}"

    def _draw(self, rng: random.Random, split: Split) -> Question:
        """The first drawn question that belongs to the split."""
        for _ in range(DRAWS):
            question = self._make(rng)
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
        """The same question over other names and data, with another answer that calls can lead to."""
        replayed = set(self.config.tools) & set(REPLAYED)
        for _ in range(DRAWS):
            other = self._make(rng)
            apart = not set(other.names) & set(question.names) and other.answer != question.answer
            if apart and other.pattern == question.pattern and len(other.names) == len(question.names):
                renamed = dict(zip(question.names, other.names, strict=True))
                if not replayed and renamed.get(question.answer) != other.answer:
                    raise self._error(
                        f"gives names, which make a twin, and tools are {list(self.config.tools)}: only "
                        f"calls of {' and '.join(REPLAYED)} are replayed on a twin, so no rollout could "
                        "be right there; leave out `names`, or give one of those tools"
                    )
                return TwinReplay(environment=other.environment, renamed=renamed, expected=other.answer)
        raise self._error(
            f"draws no twin of {question.ask!r} in {DRAWS} tries: the same words with other names "
            f"than {list(question.names)} and another answer"
        )

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"tasks '{self.config.type}': make() {what}")


@dataclass(frozen=True)
class _Sample:
    """A drawn question, and every text that a scripted run of it holds."""

    question: Question
    texts: list[str]


def _unseen(known: set[str], questions: Sequence[Question]) -> tuple[list[str], float]:
    """Names of `questions` that are not known, and their share among all of these names."""
    names = {name for question in questions for name in question.names}
    unseen = sorted(names - known)
    return unseen, len(unseen) / max(1, len(names))
