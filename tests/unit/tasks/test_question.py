"""What `make` gives is looked at before anything is made of it: every field, every kind of wrong."""

from __future__ import annotations

import datetime
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollwright.config import load
from rollwright.errors import ConfigError
from rollwright.reward.replay import _LITERAL
from rollwright.sandbox.files import _names
from rollwright.tasks.own import TEXT_ARGUMENT, OwnTasks, Question, Step
from rollwright.tasks.question import Wrong, checked, misplaced, refused_sql, unwritable
from rollwright.types import Task
from rollwright.wire import decode, encode


def base(**given: Any) -> Question:
    return Question(**{"ask": "double 3", "answer": "6", **given})


WRONG: dict[str, tuple[object, str]] = {
    "nothing": (None, "gave None: give a Question"),
    "text": ("6", "gave '6': give a Question"),
    "a dict": ({"ask": "x"}, "a dict: give a Question"),
    "an ask of a number": (base(ask=3), "gave ask = 3, an int: give text"),
    "an ask of bytes": (base(ask=b"x"), "gave ask = b'x', a bytes: give text"),
    "an empty ask": (base(ask=" "), "empty ask"),
    "an answer of a number": (base(answer=42), "gave answer = 42, an int: give text"),
    "says a number": (base(says=6), "gave says = 6, an int: give text"),
    "told a number": (base(script=(Step("python", "6", 6),)), r"script\[0\]\.told = 6, an int"),  # type: ignore[arg-type]
    "a tool of nothing": (base(script=(Step(None, "6", "6"),)), r"script\[0\]\.tool = None"),  # type: ignore[arg-type]
    "a call of a list": (base(script=(Step("shell", ["ls"], ""),)), r"script\[0\]\.call = \['ls'\], a list"),  # type: ignore[arg-type]
    "a key of a number": (base(key=0.5), "gave key = 0.5, a float: give text"),
    "names of nothing": (base(names=None), "gave names = None: give a tuple of texts"),
    "names of text": (base(names="oslo"), "gave names = 'oslo': give a tuple of texts"),
    "names of numbers": (base(names=(3,)), r"names\[0\] = 3, an int: give text"),
    "files of a list": (base(files=[("a", "b")]), "a list: give a dict from path to text"),
    "a file of bytes": (base(files={"a": b"x"}), r"files\['a'\] = b'x'"),
    "a path above": (base(files={"../../etc/x": ""}), "'../../etc/x': give a relative path"),
    "a path from the root": (base(files={"/etc/x": ""}), "'/etc/x': give a relative path"),
    "a script of text": (base(script="print(6)"), "gave script = 'print.6.': give a tuple of Steps"),
    "a script of texts": (base(script=("print(6)",)), r"script\[0\] = 'print.6.': give a Step"),
    "checks of text": (base(checks=("calls_succeed",)), r"checks\[0\] = 'calls_succeed': give a check"),
    "half a character": (base(ask="a\ud800"), "lone surrogate"),
    "half a character in a file": (base(files={"a": "\udfff"}), "lone surrogate"),
}


@pytest.mark.parametrize(("made", "told"), WRONG.values(), ids=WRONG)
def test_what_is_no_question_is_told_by_its_field(made: object, told: str) -> None:
    with pytest.raises(Wrong, match=told) as caught:
        checked(made)
    assert "\n" not in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize(("made", "told"), WRONG.values(), ids=WRONG)
def test_it_is_one_line_of_the_configuration(made: object, told: str) -> None:
    class Broken(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            return made  # type: ignore[return-value]

    with pytest.raises(ConfigError, match=told) as caught:
        Broken().build()
    assert "Broken': make() gave" in str(caught.value) and "\n" not in str(caught.value)


ANYTHING: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text()
)
ANYTHING |= st.lists(st.text() | st.integers(), max_size=3) | st.dictionaries(
    st.text(), st.text(), max_size=2
)
ANYTHING |= st.builds(Step, ANYTHING, ANYTHING, ANYTHING).map(lambda step: (step,))


@given(
    st.sampled_from(["ask", "answer", "names", "files", "sql", "script", "says", "checks", "key"]), ANYTHING
)
def test_what_is_let_through_can_be_stored(name: str, value: Any) -> None:
    class Any_(OwnTasks):
        tools: tuple[str, ...] = ()

        def make(self, rng: random.Random) -> Question:
            return base(**{name: value})

    try:
        question = checked(base(**{name: value}))
    except Wrong as error:
        assert "\n" not in str(error)
        return
    environment = question.environment
    assert decode(type(environment), encode(environment)) == environment
    assert [each.encode() for each in (question.ask, question.answer, question.key, question.says or "")]


@given(st.text("ab./\0é", max_size=12) | st.text())
@example("a/../b")
@example("a//b")
@example(".")
@example("é" * 200)
def test_a_path_is_refused_where_the_sandbox_refuses_it(path: str) -> None:
    try:
        names = _names(path)
    except PermissionError:
        assert misplaced(path) or not path.isprintable()
    else:
        assert bool(misplaced(path)) == any(len(name.encode()) > 255 for name in names)


def test_statements_are_tried_before_a_sandbox_is_made() -> None:
    assert refused_sql("CREATE TABLE t (a); INSERT INTO t VALUES (1);") == ""
    assert "syntax error" in refused_sql("CREATE TABEL t (a)")
    assert "null character" in refused_sql("SELECT '\0'")

    class Torn(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            return Question(ask=f"{rng.random()}?", answer="1", sql="INSERT INTO gone VALUES (1)")

    with pytest.raises(ConfigError, match=r"gave sql that SQLite refuses .no such table: gone."):
        Torn().build()


def tasks(draw: Callable[[random.Random], Question], **more: Any) -> OwnTasks:
    class Drawn(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            return draw(rng)

    return Drawn(**more)


def test_what_raises_is_one_line_with_file_and_line() -> None:
    def boom(rng: random.Random) -> Question:
        raise RuntimeError("boom\nand more")

    with pytest.raises(ConfigError, match=r"raised RuntimeError: boom and more \(test_question\.py:\d+\)$"):
        tasks(boom).build()

    def deep(rng: random.Random) -> Question:
        rng.sample([], 3)  # raises in the library; the line told is ours
        raise AssertionError

    with pytest.raises(ConfigError, match=r"raised ValueError: .*\(test_question\.py:\d+\)$"):
        tasks(deep).build()


def test_a_make_of_another_shape_is_told() -> None:
    class Shapeless(OwnTasks):
        def make(self) -> Question:  # type: ignore[override]
            return base()

    with pytest.raises(ConfigError, match="raised TypeError"):
        Shapeless().build()


def test_what_is_drawn_past_the_random_numbers_is_told() -> None:
    count = itertools.count()
    with pytest.raises(ConfigError, match="two different questions for one number: draw from rng only"):
        tasks(lambda rng: base(ask=f"double {rng.randint(0, 999)}", answer=str(next(count)))).build()


@pytest.mark.parametrize("tools", [(), ("shell",), ("read_file", "shell")])
def test_a_twin_needs_calls_that_are_replayed(tools: tuple[str, ...]) -> None:
    def sized(rng: random.Random) -> Question:
        name = rng.choice(["ab", "cd", "ef", "gh", "ij", "kl", "mn"])
        return Question(ask=f"size of {name}, {rng.random()}?", answer=str(rng.randint(0, 99)), names=(name,))

    def same(rng: random.Random) -> Question:
        question = sized(rng)
        return Question(ask=f"say {question.names[0]}", answer=question.names[0], names=question.names)

    def open_ended(rng: random.Random) -> Question:
        name = "".join(rng.choices("abcdefgh", k=5))
        return Question(ask=f"size of {name}?", answer=str(rng.randint(0, 99)), names=(name,))

    with pytest.raises(ConfigError, match="only calls of sql and python are replayed on a twin"):
        tasks(open_ended, tools=tools).build()
    tasks(open_ended, tools=("python",)).build()
    tasks(same, tools=(), heldout_every=2).build()  # the answer is a name, so the twin's is known


def test_the_tools_of_a_twin_are_those_that_the_reward_replays() -> None:
    from rollwright.types import REPLAYED

    assert set(TEXT_ARGUMENT) == set(_LITERAL) == set(REPLAYED)


def test_what_make_prints_is_in_no_programs_way(capsys: pytest.CaptureFixture[str]) -> None:
    def chatty(rng: random.Random) -> Question:
        print("drawing")  # noqa: T201  # what this is about
        return base(ask=f"double {rng.randint(0, 999)}")

    tasks(chatty).build().task("train", 0)
    told = capsys.readouterr()
    assert told.out == "" and "drawing" in told.err


def test_a_sound_task_is_stored_as_it_is() -> None:
    task = (
        tasks(lambda rng: base(ask=f"double {rng.randint(0, 999)}", files={"a/b.txt": "é"}))
        .build()
        .task("train", 1)
    )
    assert decode(Task, encode(task)) == task


# Warnings.


def named(names: Callable[[random.Random], str], **more: Any) -> tuple[str, ...]:
    def draw(rng: random.Random) -> Question:
        name = names(rng)
        return Question(ask=f"size of {name}?", answer=name, names=(name,), says="x")

    return tasks(draw, tools=(), **more).build().warnings()  # type: ignore[attr-defined, no-any-return]


def test_names_that_only_held_out_questions_have_are_warned_of() -> None:
    (told,) = named(lambda rng: rng.choice([a + b for a in "abcdefghijk" for b in "lmnopqrstuvw"]))
    assert "100% of the names in held-out questions occur in no train question" in told


def test_names_new_in_every_question_are_no_news() -> None:
    assert named(lambda rng: "".join(rng.choices("abcdefgh", k=9))) == ()


def test_names_that_recur_are_fine() -> None:
    def draw(rng: random.Random) -> Question:
        a, b, c = rng.sample(["oslo", "lima", "kyiv", "cairo", "delhi", "quito", "seoul", "tunis"], 3)
        return Question(ask=f"{a} to {b} by {c}?", answer=f"{a}", names=(a, b, c), says="x")

    assert tasks(draw, tools=()).build().warnings() == ()  # type: ignore[attr-defined]


def test_few_different_questions_are_warned_of() -> None:
    found = tasks(lambda rng: base(ask=f"double {rng.randint(0, 40)}")).build().warnings()  # type: ignore[attr-defined]
    assert len(found) == 1 and "different questions in 300 draws" in found[0]


ODD: dict[str, object] = {
    "a date": datetime.date(2020, 1, 1),
    "bytes": b"x",
    "a complex": 1j,
    "a pattern": re.compile("a"),
    "a function": abs,
    "a range": range(3),
    "half a character": "\ud800",
    "a date in a list": [1, [datetime.date(2020, 1, 1)]],
    "a pattern in a table": {"a": {"b": re.compile("a")}},
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_field_that_no_file_can_keep_is_refused(value: object) -> None:
    class Odd(OwnTasks):
        odd: Any = value

    with pytest.raises(ValidationError, match=r"its field 'odd' holds .* TOML and JSON cannot keep"):
        Odd()


def test_such_a_field_is_one_line_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "dated_tasks.py").write_text(
        "import datetime\nfrom rollwright.tasks.own import OwnTasks\n"
        "class Dated(OwnTasks):\n    day: datetime.date = datetime.date(2020, 1, 1)\n"
    )
    (tmp_path / "dated.toml").write_text('[tasks]\ntype = "dated_tasks:Dated"\n')
    with pytest.raises(
        ConfigError, match=r"its field 'day' holds datetime.date\(2020, 1, 1\), a date"
    ) as caught:
        load([tmp_path / "dated.toml"])
    assert "\n" not in str(caught.value)


KEPT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(KEPT)
def test_what_json_can_keep_is_let_through(value: Any) -> None:
    assert unwritable(value) is None
    assert json.loads(json.dumps(value)) == value
