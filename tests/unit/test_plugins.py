"""A module that cannot be imported: which of the ways it was, and what to do, in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rollwright.config import load
from rollwright.errors import ConfigError

NUMBERS = itertools.count()
HEAD = "import random\nfrom rollwright.tasks.own import OwnTasks, Question\n"
CLASS = "class Doubles(OwnTasks):\n    {}\n    def make(self, rng): ...\n"

WRONG = {
    "no such module": (None, "Doubles", r"no module 'MODULE'; the module must lie beside the TOML file"),
    "no such class": (HEAD + CLASS.format(""), "Dobules", r"has no 'Dobules'; did you mean 'Doubles'\?"),
    "nothing like it": (
        HEAD,
        "Doubles",
        r"the module 'MODULE' \(.*MODULE\.py\) has no 'Doubles'; give it one",
    ),
    "it raises": (
        "x = 1\nprint(y)\n",
        "Doubles",
        r"the module raised NameError: name 'y' is not defined \(MODULE\.py:2\)",
    ),
    "it asks for a missing attribute": (
        "import random\nrandom.nothing\n",
        "Doubles",
        r"raised AttributeError: module 'random' has no attribute 'nothing' \(MODULE\.py:2\)",
    ),
    "it needs another module": (
        "import gone_for_ever\n",
        "Doubles",
        r"raised ModuleNotFoundError: .*gone_for_ever. \(MODULE\.py:1\); install what is missing",
    ),
    "it is no Python": ("def make(:\n", "Doubles", r"raised SyntaxError: .*MODULE\.py, line 1"),
    "a field of the base without its type": (
        HEAD + CLASS.format("tools = ('sql',)"),
        "Doubles",
        r"'tools' has no type \(MODULE\.py:3\): annotate it: `tools: tuple\[str, \.\.\.\] = …`",
    ),
    "a field of its own without its type": (
        HEAD + CLASS.format("quills = 3"),
        "Doubles",
        r"'quills' has no type \(MODULE\.py:3\): annotate it: `quills: TYPE = …`",
    ),
}


def write(folder: Path, module: str, source: str | None, name: str) -> Path:
    if source is not None:
        (folder / f"{module}.py").write_text(source)
    path = folder / "own.toml"
    path.write_text(f'[tasks]\ntype = "{module}:{name}"\n')
    return path


@pytest.mark.parametrize(("source", "name", "told"), WRONG.values(), ids=WRONG)
def test_imports_that_fail_are_told_apart(source: str | None, name: str, told: str, tmp_path: Path) -> None:
    module = f"torn_{next(NUMBERS)}"  # a new name each time: what was imported stays
    with pytest.raises(ConfigError, match=told.replace("MODULE", module)) as caught:
        load([write(tmp_path, module, source, name)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", ["queue", "calendar"])
def test_another_module_that_comes_first_is_named(module: str, tmp_path: Path) -> None:
    path = write(tmp_path, module, HEAD + CLASS.format(""), "Doubles")
    with pytest.raises(
        ConfigError, match=rf"another module named '{module}' comes first \(.*{module}\.py\)"
    ) as caught:
        load([path])
    assert f"give {tmp_path / module}.py another name" in str(caught.value)


def test_a_module_may_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"chatty_{next(NUMBERS)}"
    load([write(tmp_path, module, HEAD + "print('hello')\n" + CLASS.format(""), "Doubles")])
    told = capsys.readouterr()
    assert told.out == "" and "hello" in told.err
