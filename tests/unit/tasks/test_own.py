"""A user's own tasks: splits by key, twins, pieces, and errors that say what to mend."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.agents.template import CONTROL
from rollwright.config import RunConfig, load
from rollwright.errors import ConfigError
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.tasks.own import OwnTasks, Question, Step
from rollwright.tasks.pieces import pieces_of
from rollwright.testing.tasksets import CHECKS
from rollwright.types import CallsSucceed, TwinReplay

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_task"
WORDS = tuple(a + b for a in ("ba", "di", "fo", "gu") for b in ("lan", "mir", "nos"))


class Prices(OwnTasks):
    """Prices of made-up items."""

    tools: tuple[str, ...] = ("sql",)
    items: int = 4

    def make(self, rng: random.Random) -> Question:
        shelf = dict(zip(rng.sample(WORDS, self.items), rng.sample(range(10, 99), self.items), strict=True))
        item, price = next(iter(shelf.items()))
        rows = ", ".join(f"('{name}', {cost})" for name, cost in shelf.items())
        return Question(
            ask=f"price of {item}?",
            answer=str(price),
            names=(item,),
            sql=f"CREATE TABLE items (name TEXT, price INTEGER); INSERT INTO items VALUES {rows};",
            script=(Step("sql", f"SELECT price FROM items WHERE name='{item}'", told=str(price)),),
        )


class Sums(OwnTasks):
    """Without tools, names or script."""

    tools: tuple[str, ...] = ()

    def make(self, rng: random.Random) -> Question:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return Question(ask=f"{a}+{b}", answer=str(a + b))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("tasks", [Prices(), Prices(seed=3, items=6), Sums()])
def test_it_keeps_the_contract_of_task_sets(check, tasks) -> None:  # type: ignore[no-untyped-def]
    check(tasks.build)


@given(st.integers(0, 10**9), st.sampled_from(["train", "heldout"]))
def test_the_twin_asks_the_same_of_other_names_with_another_answer(number: int, split: str) -> None:
    task = Prices().build().task("heldout" if split == "heldout" else "train", number)
    (twin,) = (check for check in task.checks if isinstance(check, TwinReplay))
    ((ours, theirs),) = twin.renamed.items()
    assert task.messages[-1].content == f"price of {ours}?"
    assert ours != theirs and f"('{theirs}', {twin.expected})" in twin.environment.sql
    assert f"('{ours}', {twin.expected})" not in task.environment.sql


def test_a_held_out_question_is_never_asked_in_training() -> None:
    tasks = Sums().build()
    asked = {tasks.task("train", number).messages for number in range(5000)}
    assert not asked & {tasks.task("heldout", number).messages for number in range(500)}


def test_another_seed_is_another_supply() -> None:
    one, two = Sums(seed=0).build(), Sums(seed=1).build()
    assert [one.task("train", n).messages for n in range(9)] != [
        two.task("train", n).messages for n in range(9)
    ]


def test_without_tools_the_answer_is_the_demonstration_and_no_call_is_asked_for() -> None:
    tasks = Sums().build()
    task = tasks.task("train", 0)
    script = tasks.demonstrate(task, 0)
    assert script is not None and script.calls == ()
    assert not any(isinstance(check, CallsSucceed) for check in task.checks)


def test_pieces_are_the_wording_and_the_words_that_recur() -> None:
    tasks = Prices().build()
    pieces = tasks.pieces()
    assert {"price of ", "sql SELECT price FROM items WHERE name='"} <= set(pieces)
    asked = {tasks.task("train", number).messages[-1].content for number in range(500)}
    trained = {word for word in WORDS if f"price of {word}?" in asked}
    assert len(trained) < len(WORDS) and set(pieces) & set(WORDS) == trained  # no piece that nobody trains
    codec = PieceTokenizer(pieces, CONTROL)
    for word in trained:
        (id,) = codec.encode(word)
        assert id in codec.encode(f"price of {word}?") and id in codec.encode(f"name='{word}'")


texts = st.lists(st.lists(st.text("ab 1'é_", max_size=20), max_size=4), min_size=1, max_size=20)


@settings(deadline=None)
@given(texts)
def test_pieces_occur_in_the_samples_and_never_hold_a_digit_with_anything(samples: list[list[str]]) -> None:
    pieces = pieces_of(samples)
    assert pieces == pieces_of(samples) and len(set(pieces)) == len(pieces)
    assert all(any(piece in text for sample in samples for text in sample) for piece in pieces)
    assert not any(character.isdigit() for piece in pieces for character in piece)


def question(**given: object) -> type[OwnTasks]:
    """Tasks whose every question is like that."""

    class Broken(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            number = rng.randint(0, 999)
            shared = {"ask": f"double {number}", "answer": str(2 * number)}
            return Question(**{**shared, **given})  # type: ignore[arg-type]

    return Broken


WRONG = {
    "always the same question": ({"ask": "what?"}, "no question for the split"),
    "a name that is not asked about": ({"names": ("oslo",)}, "does not hold"),
    "a tool that is not allowed": ({"script": (Step("sql", "SELECT 1", "1"),)}, r"tools are \['python'\]"),
}


@pytest.mark.parametrize(("given", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_make_is_told_before_a_run(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        question(**given)().build()
    assert "Broken" in str(caught.value) and "\n" not in str(caught.value)


def test_no_twin_is_told() -> None:
    class Alone(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            return Question(ask=f"oslo {rng.randint(0, 999)}", answer=str(rng.random()), names=("oslo",))

    with pytest.raises(ConfigError, match="no twin"):
        Alone().build()


def test_a_key_that_does_not_follow_from_the_question_is_told() -> None:
    class Loose(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            return Question(ask="how many?", answer="3", key=str(rng.random()))

    with pytest.raises(ConfigError, match="both splits"):
        Loose().build()


def test_a_class_without_make_is_told() -> None:
    class Empty(OwnTasks):
        pass

    with pytest.raises(ConfigError, match=r"no method .make"):
        Empty().build()


# How it is named in a configuration.


def test_the_example_is_short_and_found_beside_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # not where the module is
    assert len((EXAMPLE / "sales.py").read_text().splitlines()) <= 40
    config = load([EXAMPLE / "sales.toml"], ["tasks.rows=6"])
    assert config.imports == (str(EXAMPLE),)
    task = config.tasks.build().task("train", 0)  # type: ignore[attr-defined]
    assert len(task.environment.files[0].text.splitlines()) == 6
    again = RunConfig.model_validate_json(config.model_dump_json())  # as a worker process does
    assert again == config


def test_a_field_of_the_class_is_a_key_with_its_type() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.rows"):
        load([EXAMPLE / "sales.toml"], ["tasks.rows=many"])
    with pytest.raises(ConfigError, match="did you mean 'rows'"):
        load([EXAMPLE / "sales.toml"], ["tasks.row=3"])


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_imports_count_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", "far_tasks.py", "from rollwright.tasks.config import RecordsConfig as Far\n")
    path = write(tmp_path, "far.toml", 'imports = ["below"]\n[tasks]\ntype = "far_tasks:Far"\n')
    with pytest.raises(ConfigError, match="records"):  # found; its own type is another name
        load([path])


def test_a_module_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, "torn_tasks.py", "def make(:\n")
    path = write(tmp_path, "torn.toml", '[tasks]\ntype = "torn_tasks:Torn"\n')
    with pytest.raises(ConfigError, match="SyntaxError") as caught:
        load([path])
    assert "\n" not in str(caught.value)


def test_imports_that_are_no_list_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="list of folders"):
        load([write(tmp_path, "wrong.toml", 'imports = "here"\n')])


def test_a_module_beside_the_file_takes_no_installed_modules_place(tmp_path: Path) -> None:
    write(tmp_path, "numpy.py", "raise RuntimeError('taken')\n")
    write(tmp_path, "plain_tasks.py", "import numpy\nfrom rollwright.tasks.own import OwnTasks\n")
    path = write(tmp_path, "plain.toml", '[tasks]\ntype = "plain_tasks:OwnTasks"\n')
    assert load([path]).imports == (str(tmp_path),)
