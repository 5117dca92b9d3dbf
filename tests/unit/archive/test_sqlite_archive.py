"""The archive gives back what it was given, to readers of other processes too, and says what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from opened import until_end

from rollwright.archive import schema
from rollwright.archive.base import Trained
from rollwright.archive.reader import ArchiveReader, opened
from rollwright.archive.sqlite import PENDING, SqliteArchive
from rollwright.clock import SystemClock
from rollwright.errors import SchemaError, StoreError
from rollwright.testing.records import VERSION, make_group, make_sample
from rollwright.types import Message, Scored, Task, ToolCall
from rollwright.wire import encode

TASK = Task(id="t0", set="test", messages=(Message(role="user", content="<b>?"),), tools=(), checks=())


def members(number: int = 0) -> tuple[Scored, ...]:
    return make_group([1.0, 0.0, None], id=f"0-g{number}").members


def opening(path: Path) -> SqliteArchive:
    return until_end(SqliteArchive(path))


def filled(path: Path) -> SqliteArchive:
    archive = opening(path)
    for number in range(3):
        for member in members(number):
            archive.add(TASK, member)
    archive.flush()
    return archive


def test_what_was_kept_comes_back_by_every_id(tmp_path: Path) -> None:
    archive = filled(tmp_path / "a.db")
    assert [line.rollout for line in archive.lines()] == [f"0-g{g}/{m}" for g in range(3) for m in range(3)]
    member = members(1)[2]
    kept = archive.kept("0-g1/2")
    assert kept is not None and kept.task == TASK
    assert encode(kept.scored) == encode(member)
    line = archive.line("0-g1/0")
    assert line is not None
    assert (line.value, line.outcome, line.turns, line.job) == (1.0, "answered", 2, "train")
    assert line.sampled == int(members(1)[0].rollout.rows[0].sampled.sum())
    assert line.versions == (str(VERSION),)
    assert [each.rollout for each in archive.of_group("0-g2")] == ["0-g2/0", "0-g2/1", "0-g2/2"]
    assert len(archive.of_task("t0")) == len(archive.of_trace(line.trace)) == 9
    assert len(archive.lines_of(str(VERSION))) == 9
    assert archive.kept("none") is None and archive.line("none") is None and archive.samples("none") == []


def test_a_repeat_replaces(tmp_path: Path) -> None:
    archive = filled(tmp_path / "a.db")
    again = members(0)[0]
    archive.add(replace(TASK, tags={"new": "1"}), replace(again, score=replace(again.score, value=0.25)))
    archive.flush()
    line = archive.line("0-g0/0")
    assert line is not None and line.value == 0.25
    assert len(list(archive.lines())) == 9
    kept, sibling = archive.kept("0-g0/0"), archive.kept("0-g0/1")
    assert kept and kept.task.tags == {"new": "1"} and sibling and sibling.task == TASK


def test_tasks_of_one_id_and_other_contents_are_kept_apart(tmp_path: Path) -> None:
    archive = filled(tmp_path / "a.db")
    other = replace(TASK, messages=(Message(role="user", content="quite another question"),))
    for member in members(3):
        archive.add(other, member)
    archive.flush()
    for rollout, task in (("0-g0/0", TASK), ("0-g3/0", other)):
        kept = archive.kept(rollout)
        assert kept is not None and kept.task == task
    both = list(archive.whole(["0-g0/1", "0-g3/1"]))
    assert [kept.task for _, kept, _ in both] == [TASK, other]
    assert len({line.digest for line in archive.of_task("t0")}) == 2


def as_version_1(path: Path) -> None:
    """Take the file back to the schema that kept one task for each task id."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(
            "ALTER TABLE tasks RENAME TO tasks_2;"
            "CREATE TABLE tasks (task TEXT PRIMARY KEY, data BLOB NOT NULL);"
            "INSERT INTO tasks SELECT task, data FROM tasks_2; DROP TABLE tasks_2;"
            "ALTER TABLE rollouts DROP COLUMN digest; UPDATE meta SET version = 1;"
        )


@pytest.mark.parametrize("write", [False, True])
def test_an_archive_of_version_1_is_read_and_migrated_when_written(tmp_path: Path, write: bool) -> None:
    path = tmp_path / "a.db"
    archive = filled(path)
    other = replace(TASK, id="t1")
    member = members(3)[0]
    identity = replace(member.rollout.identity, task="t1")
    archive.add(other, replace(member, rollout=replace(member.rollout, identity=identity)))
    archive.close()
    as_version_1(path)
    before = path.read_bytes()
    found: ArchiveReader
    found = opening(path) if write else opened(path)
    with found:
        assert len(list(found.lines())) == 10
        for rollout, task in (("0-g2/1", TASK), ("0-g3/0", other)):
            kept = found.kept(rollout)
            assert kept is not None and kept.task == task
            assert [each.task for _, each, _ in found.whole([rollout])] == [task]
        expected = schema.digest_of(encode(TASK)) if write else "t0"
        assert {line.digest for line in found.of_task("t0")} == {expected}
    if not write:
        assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["a.db"]
        return
    again = opening(path)
    again.add(replace(TASK, tags={"a": "b"}), members(4)[0])
    again.flush()
    assert len({line.digest for line in again.of_task("t0")}) == 2


def test_a_reader_leaves_nothing_and_cannot_write(tmp_path: Path) -> None:
    filled(tmp_path / "a.db").close()
    before = (tmp_path / "a.db").read_bytes()
    with opened(tmp_path / "a.db") as reader:
        assert len(list(reader.lines())) == 9
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._db.execute("DELETE FROM rollouts")
    assert (tmp_path / "a.db").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]


def test_what_is_only_in_the_log_of_a_killed_writer_is_read_too(tmp_path: Path) -> None:
    archive, copy = filled(tmp_path / "a.db"), tmp_path / "copy"
    copy.mkdir()
    for name in ("a.db", "a.db-wal"):  # as a copy of a live run, or of one that was killed
        shutil.copyfile(tmp_path / name, copy / name)
    archive.close()
    with opened(copy / "a.db") as reader:
        assert len(list(reader.lines())) == 9


text = st.text(st.characters(), max_size=20)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answer=text, error=text, argument=st.one_of(text, st.integers(), st.just(2**70)), content=text)
def test_no_text_takes_a_record_along(
    answer: str,
    error: str,
    argument: str | int,
    content: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second, third = members(0)
    call = ToolCall(id="c", name="sql", arguments={"query": argument})
    turns = (replace(second.rollout.turns[0], calls=(call,)), *second.rollout.turns[1:])
    odd = replace(second, rollout=replace(second.rollout, answer=answer, error=error, turns=turns))
    task = replace(TASK, messages=(Message(role="user", content=content),))
    with SqliteArchive(tmp_path_factory.mktemp("archive") / "a.db") as archive:
        archive.add(TASK, first)
        archive.add(task, odd)
        archive.add(TASK, third)
        archive.flush()
        lines = list(archive.lines())
        assert [line.rollout for line in lines] == ["0-g0/0", "0-g0/1", "0-g0/2"]
        assert [line.turns for line in lines] == [2, 2, 2] and lines[1].sampled > 0
        assert [line.versions for line in lines] == [(str(VERSION),)] * 3
        kept = archive.kept("0-g0/1")
        assert kept is not None
        if isinstance(argument, int) and not -(2**63) <= argument < 2**64:  # no encoding holds it
            assert "could not be stored" in (kept.scored.rollout.error or "")
            return
        assert kept.scored.rollout.answer == answer.encode("utf-8", "replace").decode()
        assert kept.scored.rollout.error == error.encode("utf-8", "replace").decode()
        assert kept.task.messages[0].content == content.encode("utf-8", "replace").decode()


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    archive = opening(tmp_path / "a.db")
    member = members(0)[0]
    archive.add(TASK, replace(member, rollout=replace(member.rollout, answer="a\udcffb")))
    archive.flush()
    kept = archive.kept("0-g0/0")
    assert kept is not None and kept.scored.rollout.answer == "a?b"


@pytest.mark.parametrize("damage", [b"", b"\x00", zlib.compress(b"no record"), None])
def test_a_record_that_cannot_be_read_is_passed_over_and_named(tmp_path: Path, damage: bytes | None) -> None:
    archive = filled(tmp_path / "a.db")
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as db:
        if damage is None:
            db.execute("UPDATE bodies SET data = substr(data, 1, 40) WHERE rollout = '0-g1/1'")
        else:
            db.execute("UPDATE bodies SET data = ? WHERE rollout = '0-g1/1'", (damage,))
    found = [line.rollout for line, _, _ in archive.whole([line.rollout for line in archive.lines()])]
    assert len(found) == 8 and "0-g1/1" not in found
    assert archive.unreadable == {"0-g1/1"}
    assert archive.kept("0-g1/1") is None


def test_samples_are_kept_by_row_and_by_version(tmp_path: Path) -> None:
    archive = filled(tmp_path / "a.db")
    samples = [
        make_sample(advantage=0.5, rollout="0-g0/0"),
        make_sample(advantage=-0.5, rollout="0-g0/1"),
        make_sample(advantage=0.25, rollout="0-g0/0"),
    ]
    archive.trained(VERSION.next(), samples)
    found = archive.samples("0-g0/0")
    assert [each.row for each in found] == [0, 1]
    assert isinstance(found[1], Trained) and np.array_equal(found[1].advantages, samples[2].advantages)
    assert np.array_equal(found[0].weights, samples[0].weights)
    assert archive.trained_into(str(VERSION.next())) == [("0-g0/0", 0), ("0-g0/0", 1), ("0-g0/1", 0)]
    assert archive.trained_into(str(VERSION)) == []
    archive.trained(VERSION.next().next(), samples[:1])  # the step was repeated after a crash
    assert archive.samples("0-g0/0")[0].version == str(VERSION.next().next())


def test_a_full_buffer_is_written_without_a_flush(tmp_path: Path) -> None:
    archive = opening(tmp_path / "a.db")
    for number in range(PENDING):
        archive.add(TASK, members(number)[0])
    other = opening(tmp_path / "a.db")
    assert len(list(other.lines())) == PENDING


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_sqlite_archive import TASK, members
from rollwright.archive.sqlite import SqliteArchive
from pathlib import Path
archive, number = SqliteArchive(Path(sys.argv[1])), 0
while True:
    for member in members(number):
        archive.add(TASK, member)
    archive.flush()
    print(number, flush=True)
    number += 1
"""


def test_what_was_flushed_survives_kill_9_of_the_writer_while_others_read(tmp_path: Path) -> None:
    path, here = tmp_path / "a.db", Path(__file__).parent
    reader = opening(path)
    command = [sys.executable, "-c", WRITER, str(path), str(here), str(here.parents[1] / "helpers")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(50)]
        seen = len(list(reader.lines()))
        os.kill(writer.pid, signal.SIGKILL)
        said += [int(line) for line in writer.stdout.read().split()]
    assert seen >= 3 * 50
    found = {line.group for line in reader.lines()}
    assert {f"0-g{number}" for number in said} <= found
    assert all(len(reader.of_group(group)) == 3 for group in found)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "a.db").close()
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as db:
        db.execute("UPDATE meta SET version = 99")
    with pytest.raises(SchemaError, match="schema 99"):
        opening(tmp_path / "a.db")


def test_no_archive_and_no_database_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no archive"):
        opened(tmp_path / "a.db")
    (tmp_path / "b.db").write_text("not a database, and long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="damaged"):
        opened(tmp_path / "b.db")


def test_a_closed_archive_may_be_closed_again(tmp_path: Path) -> None:
    archive = opening(tmp_path / "a.db")
    archive.add(TASK, members()[0])
    archive.close()
    archive.close()
    with closing(opened(tmp_path / "a.db")) as again:
        assert [line.rollout for line in again.lines()] == ["0-g0/0"]


def test_busy_readers_do_not_stop_a_writer(tmp_path: Path) -> None:
    archive, reader = filled(tmp_path / "a.db"), opening(tmp_path / "a.db")
    lines = reader.lines()
    assert next(lines).rollout == "0-g0/0"  # a page is open
    began = SystemClock().now()
    archive.add(TASK, members(7)[0])
    archive.flush()
    assert SystemClock().now() - began < 10
    assert reader.line("0-g7/0") is not None
