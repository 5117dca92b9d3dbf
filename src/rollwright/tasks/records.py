"""Questions over a fresh SQLite database: `bada's boss's city's mayor?` takes one query for each hop.

Role: the built-in task set, small enough for a policy trained from nothing. Neighbours: `hops` makes tasks
of its walks, `config` holds wording, sizes and habits; the reward replays each answer on a twin.
Invariants: the same (seed, split, number) is the same task for ever; names are new in every task; on the
way to an answer no name occurs twice, so a stale or early answer is wrong.

**What is held out.** A name is a pair of syllables (i, j). Pairs with (i + j) mod `heldout_every` = 0 occur
only in the split `heldout`, all others only in `train`: no held-out name was ever seen in training. With
`syllables = 1` there are too few names for that; there the pair (first name, chain of relations) decides in
the same way, so no held-out question was ever seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from rollwright.tasks.base import Split
from rollwright.tasks.config import RecordsConfig
from rollwright.tasks.hops import Database, HopTasks, Walk

_SYLLABLES = tuple(c + v for c in "bdfghjklmnprstvz" for v in "aeiou")
FIRST, SECOND = _SYLLABLES[0::2], _SYLLABLES[1::2]
"""The halves of a name, 40 each, none in both: a name is read in one way only."""

TABLES = {"people": ("boss", "friend", "city"), "cities": ("mayor", "twin")}
"""Table → its relations; each table also has the column `name`."""

LEADS_TO = {"boss": "people", "friend": "people", "mayor": "people", "city": "cities", "twin": "cities"}
"""Relation → the table whose names it holds."""

TABLE_OF = {relation: table for table, relations in TABLES.items() for relation in relations}


class Records(HopTasks):
    """The task set `records`."""

    name = "records"
    tables = TABLES
    relations = tuple(LEADS_TO)

    def __init__(self, config: RecordsConfig) -> None:
        super().__init__(config)
        self.config = config

    def _words(self) -> tuple[str, ...]:
        return (*FIRST, *SECOND)

    def _draw(self, split: Split, number: int) -> Walk:
        """The database of a task and its twin: the same question, other names, another wiring."""
        rng = random.Random(f"records/{self.config.seed}/{split}/{number}")
        size = self.config.people + self.config.cities
        for _ in range(10_000):
            names = self._names(rng, split, 2 * size)
            relations = tuple(_relations(rng, self.config.hops))
            ours = self._instance(rng, names[:size], relations)
            twin = self._instance(rng, names[size:], relations, apart=True)
            if ours and twin and self._belongs(relations, ours[1][0], split):
                return Walk(relations, *ours, *twin)
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

    def _belongs(self, relations: tuple[str, ...], start: str, split: Split) -> bool:
        if self.config.syllables == 2:
            return True  # its names say so already
        order = list(LEADS_TO)
        chain = sum(order.index(relation) * len(order) ** hop for hop, relation in enumerate(relations))
        return self._held_out(_SYLLABLES.index(start), chain) == (split == "heldout")

    def _held_out(self, i: int, j: int) -> bool:
        return (i + j) % self.config.heldout_every == 0

    def _instance(
        self, rng: random.Random, names: list[str], relations: tuple[str, ...], *, apart: bool = False
    ) -> tuple[Database, tuple[str, ...]] | None:
        """A random database over `names` and a way through it that visits no name twice; None where there is
        none.

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
        return Database(facts, {table: tuple(rows) for table, rows in held.items()}), tuple(chain)


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
