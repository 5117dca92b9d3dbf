"""Questions over a fresh SQLite database: `bada's boss's city's mayor?` takes one query for each hop.

Role: the built-in task set, small enough for a policy trained from nothing. Neighbours: `config` holds
wording, sizes and habits; the reward replays each answer on a twin. Invariants: the same (seed, split,
number) is the same task for ever; names are new in every task; on the way to an answer no name occurs
twice, so a stale or early answer is wrong.

**What is held out.** A name is a pair of syllables (i, j). Pairs with (i + j) mod `heldout_every` = 0 occur
only in the split `heldout`, all others only in `train`: no held-out name was ever seen in training. With
`syllables = 1` there are too few names for that; there the pair (first name, chain of relations) decides in
the same way, so no held-out question was ever seen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollwright.tasks.base import Demonstration, Split
from rollwright.tasks.config import RecordsConfig
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

_SYLLABLES = tuple(c + v for c in "bdfghjklmnprstvz" for v in "aeiou")
FIRST, SECOND = _SYLLABLES[0::2], _SYLLABLES[1::2]
"""The halves of a name, 40 each, none in both: a name is read in one way only."""

TABLES = {"people": ("boss", "friend", "city"), "cities": ("mayor", "twin")}
"""Table → its relations; each table also has the column `name`."""

LEADS_TO = {"boss": "people", "friend": "people", "mayor": "people", "city": "cities", "twin": "cities"}
"""Relation → the table whose names it holds."""

TABLE_OF = {relation: table for table, relations in TABLES.items() for relation in relations}
TOOL = "sql"
NOTHING, WRONG_TABLE = "none", "error: no such column:"
"""What the tool says where it does not say a name."""


@dataclass(frozen=True)
class Instance:
    """One database and the way of the question through it."""

    facts: dict[tuple[str, str], str]
    """(relation, name) → the name it leads to."""
    names: dict[str, tuple[str, ...]]
    """Table → its rows' names, in order."""
    relations: tuple[str, ...]
    chain: tuple[str, ...]
    """The first name, then what each hop gives; one longer than `relations`."""

    def sql(self) -> str:
        """Statements that make the database."""
        statements = []
        for table, relations in TABLES.items():
            columns = ("name", *relations)
            rows = [(name, *(self.facts[r, name] for r in relations)) for name in self.names[table]]
            values = ", ".join("(" + ", ".join(f"'{cell}'" for cell in row) + ")" for row in rows)
            declared = ", ".join(f"{column} TEXT" for column in columns)
            statements.append(f"CREATE TABLE {table} ({declared}); INSERT INTO {table} VALUES {values};")
        return "\n".join(statements)


class Records:
    """The task set `records`."""

    name = "records"

    def __init__(self, config: RecordsConfig) -> None:
        self.config = config
        self._last: tuple[tuple[Split, int], tuple[Instance, Instance]] | None = None

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0 of a split."""
        ours, twin = self._instances(split, number)
        config = self.config
        chain = "".join(config.step.format(relation=relation) for relation in ours.relations)
        question = config.question.format(start=ours.chain[0], chain=chain)
        checks = (
            CallsSucceed(),
            AnswerEquals(expected=ours.chain[-1]),
            ValuesSeen(values=ours.chain[1:-1]),
            TwinReplay(
                environment=Environment(sql=twin.sql()),
                renamed={ours.chain[0]: twin.chain[0]},
                expected=twin.chain[-1],
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
            environment=Environment(sql=ours.sql()),
            limits=config.limits.build(),
            tags={"hops": str(config.hops), "chain": ".".join(ours.relations)},
        )

    def demonstrate(self, task: Task, number: int) -> Demonstration:
        """A scripted run with the habits of the configuration; the same for the same (task, number)."""
        _, _, split, index = task.id.split("/")
        ours, _ = self._instances("heldout" if split == "heldout" else "train", int(index))
        rng = random.Random(f"{task.id}/demonstration/{number}")
        calls, told, seen = [], [], [ours.chain[0]]
        for hop, relation in enumerate(ours.relations):
            if hop and rng.random() < self._early(relation):
                break
            table, asked, key = self._query(rng, hop, relation, seen)
            query = self.config.query.format(relation=asked, table=table, name=key)
            calls.append(ToolCall(id=f"{task.id}/{number}/{hop}", name=TOOL, arguments={"query": query}))
            if TABLE_OF[asked] != table:
                told.append(f"{WRONG_TABLE} {asked}")
                break  # gives up with the newest name
            found = ours.facts.get((asked, key))
            told.append(found or NOTHING)
            if found is None:
                break
            seen.append(found)
        return Demonstration(calls=tuple(calls), observations=tuple(told), answer=seen[-1])

    def _early(self, relation: str) -> float:
        habits = self.config.habits
        return habits.early_often if relation in habits.skipped else habits.early

    def _query(self, rng: random.Random, hop: int, relation: str, seen: list[str]) -> tuple[str, str, str]:
        """(table, relation, key) of one hop, as the habits have it; `seen` are the names so far, newest
        last."""
        habits, key = self.config.habits, seen[-1]
        stale = habits.stale_often if relation in habits.forgotten else habits.stale
        if hop and rng.random() < stale:
            key = seen[0] if rng.random() < habits.stale_question else rng.choice(seen[:-1])
        table = TABLE_OF[relation]
        if rng.random() < habits.relation:
            relation = rng.choice([other for other in TABLES[table] if other != relation])
        if rng.random() < habits.table:
            table = next(other for other in TABLES if other != table)
        return table, relation, key

    def pieces(self) -> tuple[str, ...]:
        """Text pieces that a small tokenizer should know as one token: the fixed parts of every text,
        relations, syllables."""
        config = self.config
        spaced = [f" {word}" for word in (*LEADS_TO, *TABLES)]
        fixed = [config.system, NOTHING, WRONG_TABLE, "error: "]
        for template in (config.step, config.question, config.query, f"{TOOL} {config.query}"):
            fixed += _literals(template)
        return tuple(dict.fromkeys([*fixed, *spaced, *LEADS_TO, *TABLES, *FIRST, *SECOND]))

    def _instances(self, split: Split, number: int) -> tuple[Instance, Instance]:
        """The database of a task and its twin: the same question, other names, another wiring."""
        if self._last is not None and self._last[0] == (split, number):
            return self._last[1]
        rng = random.Random(f"records/{self.config.seed}/{split}/{number}")
        size = self.config.people + self.config.cities
        for _ in range(10_000):
            names = self._names(rng, split, 2 * size)
            relations = tuple(_relations(rng, self.config.hops))
            ours = self._instance(rng, names[:size], relations)
            twin = self._instance(rng, names[size:], relations, apart=True)
            if ours and twin and self._belongs(ours, split):
                self._last = ((split, number), (ours, twin))
                return ours, twin
        raise AssertionError(f"no database in 10,000 draws for {self.config!r}")

    def _names(self, rng: random.Random, split: Split, count: int) -> list[str]:
        if self.config.syllables == 1:
            return rng.sample(_SYLLABLES, count)
        names: dict[str, None] = {}
        while len(names) < count:
            i, j = rng.randrange(len(FIRST)), rng.randrange(len(SECOND))
            if self._held_out(i, j) == (split == "heldout"):
                names[FIRST[i] + SECOND[j]] = None
        return list(names)

    def _belongs(self, ours: Instance, split: Split) -> bool:
        if self.config.syllables == 2:
            return True  # its names say so already
        order = list(LEADS_TO)
        chain = sum(order.index(relation) * len(order) ** hop for hop, relation in enumerate(ours.relations))
        return self._held_out(_SYLLABLES.index(ours.chain[0]), chain) == (split == "heldout")

    def _held_out(self, i: int, j: int) -> bool:
        return (i + j) % self.config.heldout_every == 0

    def _instance(
        self, rng: random.Random, names: list[str], relations: tuple[str, ...], *, apart: bool = False
    ) -> Instance | None:
        """A random database over `names` whose question visits no name twice; None where there is none.

        `apart`: whatever is not part of the question leads off its way, as far as there are names enough, so
        that a wrong query does not come back to the answer by chance.
        """
        held = {"people": names[: self.config.people], "cities": names[self.config.people :]}
        chain = [rng.choice(held["people"])]
        for relation in relations:
            new = [name for name in held[LEADS_TO[relation]] if name not in chain]
            if not new:
                return None
            chain.append(rng.choice(new))
        facts = {}
        for relation, table in TABLE_OF.items():
            others = held[LEADS_TO[relation]]
            off = [name for name in others if name not in chain] if apart else others
            for name in held[table]:
                facts[relation, name] = _other(rng, off if set(off) - {name} else others, name)
        facts.update({(relations[hop], chain[hop]): chain[hop + 1] for hop in range(len(relations))})
        return Instance(facts, {table: tuple(rows) for table, rows in held.items()}, relations, tuple(chain))


def _other(rng: random.Random, names: list[str], name: str) -> str:
    """Any of `names` but `name`."""
    while True:
        found = names[int(rng.random() * len(names))]
        if found != name:
            return found


def _relations(rng: random.Random, hops: int) -> Iterator[str]:
    """A typed way from a person: each relation is one of the table that the one before led to."""
    table = "people"
    for _ in range(hops):
        relation = rng.choice(TABLES[table])
        yield relation
        table = LEADS_TO[relation]


def _literals(template: str) -> list[str]:
    """The fixed parts of a template; a space before a word that is filled in belongs to that word."""
    parts = re.split(r"\{(\w+)\}", template)
    return [
        part.removesuffix(" ") if field in ("relation", "table") else part
        for part, field in zip(parts[0::2], [*parts[1::2], ""], strict=True)
        if part.removesuffix(" ")
    ]
