"""`records`: its truth is asked of SQLite, its splits share no name, its demonstrations have the habits."""

import re
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opened import until_end

from rollwright.model.tokenizer import PieceTokenizer
from rollwright.tasks.config import HabitsConfig, RecordsConfig
from rollwright.tasks.records import TABLE_OF, Records
from rollwright.types import AnswerEquals, Task, TwinReplay, ValuesSeen

RECORDS = Records(RecordsConfig())
RIGHT = HabitsConfig(stale=0, stale_often=0, early=0, early_often=0, table=0)


def database(sql: str) -> sqlite3.Connection:
    connection = until_end(sqlite3.connect(":memory:"))
    connection.executescript(sql)
    return connection


def follow(sql: str, start: str, relations: list[str]) -> list[str]:
    """What each hop really gives."""
    connection, name, seen = database(sql), start, []
    for relation in relations:
        table = TABLE_OF[relation]
        rows = connection.execute(f"SELECT {relation} FROM {table} WHERE name=?", (name,)).fetchall()
        assert len(rows) == 1
        name = rows[0][0]
        seen.append(name)
    connection.close()
    return seen


def names(task: Task) -> set[str]:
    connection = database(task.environment.sql)
    found = {
        row[0] for table in ("people", "cities") for row in connection.execute(f"SELECT name FROM {table}")
    }
    connection.close()
    return found


def check_of(task: Task, kind: type) -> object:
    return next(check for check in task.checks if isinstance(check, kind))


@given(st.integers(0, 10**9), st.sampled_from(["train", "heldout"]), st.integers(1, 4), st.integers(0, 99))
def test_the_reference_queries_give_the_answer(number: int, split: str, hops: int, seed: int) -> None:
    task = Records(RecordsConfig(hops=hops, seed=seed)).task(split, number)  # type: ignore[arg-type]
    question = task.messages[-1].content
    start, *relations = re.findall(r"\w\w+", question.replace("'s", " "))
    assert len(relations) == hops
    way = follow(task.environment.sql, start, relations)
    answer, seen, twin = (check_of(task, kind) for kind in (AnswerEquals, ValuesSeen, TwinReplay))
    assert isinstance(answer, AnswerEquals) and isinstance(seen, ValuesSeen) and isinstance(twin, TwinReplay)
    assert answer.expected == way[-1]
    assert seen.values == tuple(way[:-1])
    assert len({start, *way}) == hops + 1  # no name twice: a stale or early answer is wrong
    other = follow(twin.environment.sql, twin.renamed[start], relations)
    assert other[-1] == twin.expected
    assert not {start, *way} & {twin.renamed[start], *other}


def test_held_out_names_never_occur_in_training() -> None:
    train = set().union(*(names(RECORDS.task("train", i)) for i in range(300)))
    heldout = set().union(*(names(RECORDS.task("heldout", i)) for i in range(100)))
    assert len(train) > 900 and len(heldout) > 90
    assert not train & heldout


def test_with_one_syllable_no_question_is_shared() -> None:
    records = Records(RecordsConfig(syllables=1))
    train = {records.task("train", i).messages for i in range(400)}
    assert not train & {records.task("heldout", i).messages for i in range(400)}


def test_names_are_new_in_every_task_and_in_its_twin() -> None:
    first, second = RECORDS.task("train", 0), RECORDS.task("train", 1)
    assert len(names(first)) == len(names(second)) == 12
    assert len(names(first) & names(second)) < 3
    twin = check_of(first, TwinReplay)
    assert isinstance(twin, TwinReplay)
    assert not names(first) & names(Task(**{**_fields(first), "environment": twin.environment}))


def _fields(task: Task) -> dict[str, object]:
    return {name: getattr(task, name) for name in task.__struct_fields__}


def test_a_script_without_habits_answers_right() -> None:
    records = Records(RecordsConfig(habits=RIGHT))
    for number in range(50):
        task = records.task("train", number)
        script, answer = records.demonstrate(task, 0), check_of(task, AnswerEquals)
        assert isinstance(answer, AnswerEquals)
        assert script.answer == answer.expected
        assert len(script.calls) == 3


def test_what_a_script_is_told_is_what_the_database_says() -> None:
    records = Records(RecordsConfig(habits=HabitsConfig(table=0.3, relation=0.3)))
    told = set()
    for number in range(200):
        task = records.task("train", number)
        connection = database(task.environment.sql)
        script = records.demonstrate(task, number)
        for call, observation in zip(script.calls, script.observations, strict=True):
            try:
                rows = connection.execute(call.arguments["query"]).fetchall()
                really = rows[0][0] if rows else "none"
            except sqlite3.Error as error:
                really = f"error: {error}"
            assert observation == really
            told.add(really if " " in really or really == "none" else "a name")
        assert script.answer in (*script.observations, task.messages[-1].content.partition("'")[0])
        connection.close()
    assert {"a name", "none"} < told and len(told) > 4


@pytest.mark.parametrize(
    ("habits", "expected"),
    [
        (HabitsConfig(stale=0, stale_often=0, early=1, early_often=1, table=0), 1),
        (HabitsConfig(stale=0, stale_often=0, early=0, early_often=0, table=1), 1),
        (RIGHT, 3),
    ],
)
def test_certain_habits_always_show(habits: HabitsConfig, expected: int) -> None:
    records = Records(RecordsConfig(habits=habits))
    for number in range(20):
        assert len(records.demonstrate(records.task("train", number), 0).calls) == expected


def test_a_certain_stale_key_asks_with_the_name_of_the_question() -> None:
    habits = HabitsConfig(stale=1, stale_often=1, stale_question=1, early=0, early_often=0, table=0)
    records = Records(RecordsConfig(habits=habits))
    for number in range(20):
        task = records.task("train", number)
        start = task.messages[-1].content.partition("'")[0]
        for call in records.demonstrate(task, 0).calls:
            assert call.arguments["query"].endswith(f"'{start}'")


def test_the_default_habits_leave_some_scripts_right() -> None:
    right = 0
    for number in range(400):
        task, answer = RECORDS.task("train", number), None
        answer = check_of(task, AnswerEquals)
        assert isinstance(answer, AnswerEquals)
        right += RECORDS.demonstrate(task, number).answer == answer.expected
    assert 0.1 < right / 400 < 0.5  # under about 10 % a policy does not take off


def test_every_text_of_a_task_is_spelled_in_few_pieces() -> None:
    codec = PieceTokenizer(RECORDS.pieces(), ["<call>"])
    longest = 0
    for number in range(50):
        task = RECORDS.task("heldout", number)
        script = RECORDS.demonstrate(task, number)
        texts = [message.content for message in task.messages] + list(script.observations) + [script.answer]
        texts += [f"sql {call.arguments['query']}" for call in script.calls]
        for text in texts:
            ids = codec.encode(text)
            assert codec.decode(ids) == text
            single = [id for id in ids if id < 256]
            assert {chr(id) for id in single} <= {"?", "'"}, text
            longest = max(longest, len(ids))
    assert longest <= 9


def test_wording_is_configuration() -> None:
    config = RecordsConfig(
        system="tables",
        question="Who is {start}{chain}",
        step=" → {relation}",
        query="{relation} {table} {name}",
    )
    records = Records(config)
    task = records.task("train", 0)
    assert task.messages[0].content == "tables"
    assert re.fullmatch(r"Who is \w{4}( → \w+){3}", task.messages[1].content)
    assert "Who is " in records.pieces()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"query": "SELECT {relation}"}, "placeholders"),
        ({"syllables": 1, "people": 40, "cities": 5}, "fit"),
        ({"people": 2, "cities": 2, "hops": 5}, "hops"),
        ({"hopps": 3}, "hopps"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RecordsConfig.model_validate(settings)
