"""Tasks from files: what is no task is refused with file and line."""

from pathlib import Path

import msgspec
import pytest

from rollwright.errors import ConfigError
from rollwright.tasks.config import JsonlConfig
from rollwright.tasks.jsonl import JsonlTasks, read_tasks
from rollwright.types import AnswerEquals, Check, Message, ReturnValue, Task


def task(id: str, *checks: Check, text: str | None = None) -> Task:
    return Task(
        id=id,
        set="jsonl",
        messages=(Message(role="user", content=text or f"question {id}"),),
        tools=("sql",),
        checks=checks or (AnswerEquals(expected="a"),),  # type: ignore[arg-type]
    )


def write(path: Path, *lines: Task | str) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in lines)
    )
    return path


def test_tasks_come_back_as_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", task("1"), "", task("2"))
    assert read_tasks(path) == [task("1"), task("2")]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"id": "x"', "not a task"),
        ("[]", "not a task"),
        ('{"id":"x","set":"s","messages":[],"tools":[],"checks":[],"limit":{}}', "limit"),
        ('{"id":"x","set":"s","messages":[],"tools":[],"checks":[{"kind":"magic"}]}', "magic"),
        (
            '{"id":"x","set":"s","messages":[],"tools":[],"checks":[{"kind":"answer_equals","wanted":"a"}]}',
            "wanted",
        ),
        ("\udcff", "not a task"),
    ],
)
def test_a_line_that_is_no_task_is_named(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(msgspec.json.encode(task("1")) + b"\n" + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{text}"):
        read_tasks(path)


def test_a_repeated_id_an_empty_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the id '1'"):
        read_tasks(write(tmp_path / "a.jsonl", task("1"), task("1", text="another")))
    with pytest.raises(ConfigError, match="holds no task"):
        read_tasks(write(tmp_path / "b.jsonl", ""))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tasks(tmp_path / "none.jsonl")


def test_python_checks_are_taken_only_where_the_file_is_trusted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", task("1", ReturnValue(expression="x", expected="1")))
    with pytest.raises(ConfigError, match="trust_python"):
        read_tasks(path)
    assert len(read_tasks(path, trust_python=True)) == 1


@pytest.mark.parametrize("shared", [task("1", text="new"), task("9", text="question 1")])
def test_splits_that_share_an_id_or_a_conversation_are_refused(tmp_path: Path, shared: Task) -> None:
    train = write(tmp_path / "train.jsonl", task("1"), task("2"))
    with pytest.raises(ConfigError, match="held-out tasks must be new"):
        JsonlTasks(JsonlConfig(train=train, heldout=write(tmp_path / "heldout.jsonl", shared)))


def test_training_begins_again_and_held_out_tasks_are_counted_once(tmp_path: Path) -> None:
    tasks = JsonlTasks(
        JsonlConfig(
            train=write(tmp_path / "train.jsonl", task("1"), task("2")),
            heldout=write(tmp_path / "heldout.jsonl", task("3")),
        )
    )
    assert tasks.task("train", 3) == task("2")
    assert tasks.task("heldout", 0) == task("3")
    with pytest.raises(ConfigError, match="1 held-out tasks, number 1"):
        tasks.task("heldout", 1)
