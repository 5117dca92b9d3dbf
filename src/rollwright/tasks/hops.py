"""Multi-hop questions over a small database of two tables: what `records` and `atlas` share.

Role: from a walk through a database to a task with its checks, its scripted runs and its pieces of text.
Neighbours: a task set says which walk belongs to a number, its configuration holds wording and habits.
Invariants: the same (split, number) is the same task for ever; a scripted run is told what the real tool
says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollwright.tasks.base import Demonstration, Split
from rollwright.tasks.config import HabitsConfig, LimitsConfig
from rollwright.types import (
    AnswerEquals,
    CallsSucceed,
    Environment,
    Message,
    Task,
    ToolCall,
    TwinReplay,
    ValuesSeen,
)

TOOL = "sql"
NOTHING, WRONG_TABLE = "none", "error: no such column:"
"""What the tool says where it does not say a name."""


class HopsConfig(Protocol):
    """What the configuration of such a task set holds."""

    @property
    def seed(self) -> int: ...
    @property
    def hops(self) -> int: ...
    @property
    def system(self) -> str: ...
    @property
    def step(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def query(self) -> str: ...
    @property
    def habits(self) -> HabitsConfig: ...
    @property
    def limits(self) -> LimitsConfig: ...


@dataclass(frozen=True)
class Database:
    """Two tables, each with the column `name` and its relations."""

    facts: Mapping[tuple[str, str], str]
    """(relation, name) → the name it leads to."""
    names: Mapping[str, tuple[str, ...]]
    """Table → its rows' names, in order."""

    def sql(self, tables: Mapping[str, Sequence[str]]) -> str:
        """Statements that make it."""
        statements = []
        for table, relations in tables.items():
            columns = ("name", *relations)
            rows = [(name, *(self.facts[r, name] for r in relations)) for name in self.names[table]]
            values = ", ".join("(" + ", ".join(f"'{cell}'" for cell in row) + ")" for row in rows)
            declared = ", ".join(f"{column} TEXT" for column in columns)
            statements.append(f"CREATE TABLE {table} ({declared}); INSERT INTO {table} VALUES {values};")
        return "\n".join(statements)

    def renamed(self, names: Mapping[str, str]) -> Database:
        """The same database, some names of it replaced."""
        return Database(
            {
                (relation, names.get(name, name)): names.get(found, found)
                for (relation, name), found in self.facts.items()
            },
            {table: tuple(names.get(name, name) for name in rows) for table, rows in self.names.items()},
        )


@dataclass(frozen=True)
class Walk:
    """A question and the way of its answer, through a database and through its twin."""

    relations: tuple[str, ...]
    database: Database
    way: tuple[str, ...]
    """The first name, then what each hop gives; one longer than `relations`."""
    twin: Database
    twin_way: tuple[str, ...]


class HopTasks:
    """A task set of such questions; a subclass says `name`, `tables`, `_draw` and `_words`."""

    name: str
    tables: Mapping[str, tuple[str, ...]]
    """Table → its relations."""
    relations: tuple[str, ...]
    """All of them, in the order in which the tokenizer knows them."""

    def __init__(self, config: HopsConfig) -> None:
        self._told = config
        self._last: tuple[tuple[Split, int], Walk] | None = None

    def _draw(self, split: Split, number: int) -> Walk:
        """The walk of a task, from random numbers that hang on the seed, the split and the number only."""
        raise NotImplementedError

    def _words(self) -> Sequence[str]:
        """The pieces of text that names are made of."""
        raise NotImplementedError

    def walk(self, split: Split, number: int) -> Walk:
        """The walk of task `number` ≥ 0 of a split."""
        if self._last is None or self._last[0] != (split, number):
            self._last = ((split, number), self._draw(split, number))
        return self._last[1]

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0 of a split."""
        walk, config = self.walk(split, number), self._told
        chain = "".join(config.step.format(relation=relation) for relation in walk.relations)
        question = config.question.format(start=walk.way[0], chain=chain)
        checks = (
            CallsSucceed(),
            AnswerEquals(expected=walk.way[-1]),
            ValuesSeen(values=walk.way[1:-1]),
            TwinReplay(
                environment=Environment(sql=walk.twin.sql(self.tables)),
                renamed={walk.way[0]: walk.twin_way[0]},
                expected=walk.twin_way[-1],
            ),
        )
        return Task(
            id=f"{self.name}/{config.seed}/{split}/{number}",
            set=self.name,
            messages=(
                Message(role="system", content=config.system),
                Message(role="user", content=question),
            ),
            tools=(TOOL,),
            checks=checks,
            environment=Environment(sql=walk.database.sql(self.tables)),
            limits=config.limits.build(),
            tags={"hops": str(config.hops), "chain": ".".join(walk.relations)},
        )

    def demonstrate(self, task: Task, number: int) -> Demonstration:
        """A scripted run with the habits of the configuration; the same for the same (task, number)."""
        _, _, split, index = task.id.split("/")
        walk = self.walk("heldout" if split == "heldout" else "train", int(index))
        rng = random.Random(f"{task.id}/demonstration/{number}")
        calls, told, seen = [], [], [walk.way[0]]
        for hop, relation in enumerate(walk.relations):
            if hop and rng.random() < self._early(relation):
                break
            table, asked, key = self._query(rng, hop, relation, seen)
            query = self._told.query.format(relation=asked, table=table, name=key)
            calls.append(ToolCall(id=f"{task.id}/{number}/{hop}", name=TOOL, arguments={"query": query}))
            if asked not in self.tables[table]:
                told.append(f"{WRONG_TABLE} {asked}")
                break  # gives up with the newest name
            found = walk.database.facts.get((asked, key))
            told.append(found or NOTHING)
            if found is None:
                break
            seen.append(found)
        return Demonstration(calls=tuple(calls), observations=tuple(told), answer=seen[-1])

    def _early(self, relation: str) -> float:
        habits = self._told.habits
        return habits.early_often if relation in habits.skipped else habits.early

    def _query(self, rng: random.Random, hop: int, relation: str, seen: list[str]) -> tuple[str, str, str]:
        """(table, relation, key) of one hop, as the habits have it; `seen` are the names so far, newest
        last."""
        habits, key = self._told.habits, seen[-1]
        stale = habits.stale_often if relation in habits.forgotten else habits.stale
        if hop and rng.random() < stale:
            key = seen[0] if rng.random() < habits.stale_question else rng.choice(seen[:-1])
        table = next(table for table, relations in self.tables.items() if relation in relations)
        if rng.random() < habits.relation:
            relation = rng.choice([other for other in self.tables[table] if other != relation])
        if rng.random() < habits.table:
            table = next(other for other in self.tables if other != table)
        return table, relation, key

    def pieces(self) -> tuple[str, ...]:
        """Text pieces that a small tokenizer should know as one token: the fixed parts of every text,
        relations, the pieces of names."""
        config = self._told
        spaced = [f" {word}" for word in (*self.relations, *self.tables)]
        fixed = [config.system, NOTHING, WRONG_TABLE, "error: "]
        for template in (config.step, config.question, config.query, f"{TOOL} {config.query}"):
            fixed += _literals(template)
        return tuple(dict.fromkeys([*fixed, *spaced, *self.relations, *self.tables, *self._words()]))


def _literals(template: str) -> list[str]:
    """The fixed parts of a template; a space before a word that is filled in belongs to that word."""
    parts = re.split(r"\{(\w+)\}", template)
    return [
        part.removesuffix(" ") if field in ("relation", "table") else part
        for part, field in zip(parts[0::2], [*parts[1::2], ""], strict=True)
        if part.removesuffix(" ")
    ]
