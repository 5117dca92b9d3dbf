"""One question as a user's `make` draws it, and the look at whether it is one.

Role: `Question` and its `Step`, what `own` makes tasks of. Neighbours: `own`. Invariants: `checked` lets
nothing through that cannot be stored as a task or laid into a sandbox; what it refuses it names by field,
with what was given and what to give.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from rollwright.types import AnyCheck, Check, Environment, File, Json

LONGEST_NAME = 255
"""Bytes of one part of a file's path, as file systems have it."""
_SHOWN = 60


@dataclass(frozen=True)
class Step:
    """One call of a scripted run, and what the tool says to it, to the letter."""

    tool: str
    call: str | Mapping[str, Json]
    """The code or the query, for `python` and `sql`; the arguments by name, for any tool."""
    told: str


@dataclass(frozen=True)
class Question:
    """One question as `OwnTasks.make` draws it."""

    ask: str
    answer: str
    names: tuple[str, ...] = ()
    """The words of `ask` that vary. With them each task gets a twin: the same question over other names and
    other data, on which the agent's calls have to lead to the right answer too, so that a guess wins
    nothing. Only calls of `sql` and `python` are replayed there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text of the files in the sandbox."""
    sql: str = ""
    """Statements that make the sandbox's database."""
    script: tuple[Step, ...] = ()
    """What a scripted run does; the warm start learns from it, mistakes included."""
    says: str | None = None
    """What the scripted run answers; `answer` where this is not given."""
    checks: tuple[AnyCheck, ...] = ()
    """Further checks, beyond those on the calls, the answer and the twin."""
    key: str = ""
    """Decides the split; `ask` where this is empty. It must follow from `ask`."""

    @property
    def environment(self) -> Environment:
        """What the sandbox holds."""
        files = tuple(File(path=path, text=text) for path, text in self.files.items())
        return Environment(files=files, sql=self.sql)

    @property
    def pattern(self) -> str:
        """The question with its names left open: equal for a question and its twin."""
        text = self.ask
        for number, name in enumerate(self.names):
            text = re.sub(rf"\b{re.escape(name)}\b", f"\0{number}\0", text)
        return text


class Wrong(ValueError):
    """What is wrong with a question, in words that follow `make()`."""


def checked(made: object) -> Question:
    """`made`, if it is a question whose fields hold what they say.

    Raises:
        Wrong: it is not; the text names the field, what was given and what to give.
    """
    if not isinstance(made, Question):
        raise Wrong(f"gave {told(made)}: give a Question")
    for each in ("ask", "answer", "sql", "key"):
        _text(each, getattr(made, each))
    if made.says is not None:
        _text("says", made.says)
    if not made.ask.strip():
        raise Wrong("gave an empty ask: give the question")
    for number, name in enumerate(_items("names", made.names, "texts")):
        _text(f"names[{number}]", name)
        if not name or str(name) not in made.ask:
            raise Wrong(f"names {told(name)}, which the question {told(made.ask)} does not hold")
    for number, step in enumerate(_items("script", made.script, "Steps")):
        _step(f"script[{number}]", step)
    for number, check in enumerate(_items("checks", made.checks, "checks")):
        if not isinstance(check, Check):
            raise Wrong(f"gave checks[{number}] = {told(check)}: give a check of rollwright.types")
    _files(made.files)
    return made


def refused_sql(statements: str) -> str:
    """What SQLite has against `statements`, tried on an empty database in memory; "" where nothing."""
    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.executescript(statements)
    except (sqlite3.Error, ValueError) as error:  # a ValueError: a character 0
        return str(error)
    return ""


def misplaced(path: str) -> str:
    """Why no file can lie at `path` in a sandbox; "" where one can. The same paths are refused by
    `sandbox.files` when the sandbox is made."""
    parts = path.split("/")
    names = [name for name in parts if name not in ("", ".")]
    if parts[0] == "" or ".." in names or "\0" in path or not names:
        return "give a relative path below the working folder"
    if any(len(name.encode("utf-8", "replace")) > LONGEST_NAME for name in names):
        return f"give names of at most {LONGEST_NAME} bytes"
    return ""


def unwritable(value: object) -> object | None:
    """The part of a configuration's value that TOML and JSON cannot keep; None where there is none."""
    if value is None or isinstance(value, bool | int | float | Path | BaseModel):
        return None
    if isinstance(value, str):
        return None if _storable(value) else value
    if isinstance(value, list | tuple | set | frozenset):
        return next((odd for odd in map(unwritable, value) if odd is not None), None)
    if isinstance(value, dict):
        return unwritable([*value.keys(), *value.values()])
    return value


def told(value: object) -> str:
    """A value for a message: what it is, and of which type, in one line."""
    if value is None:
        return "None"
    kind = type(value).__name__
    text = ascii(value) if isinstance(value, str) and not _storable(value) else repr(value)
    text = " ".join(text.split())
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    if isinstance(value, str):
        return text
    return f"{text}, {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise Wrong(f"gave {name} = {told(value)}: give text")
    if not _storable(value):
        raise Wrong(f"gave {name} = {told(value)}: half a character (a lone surrogate); give text in Unicode")


def _storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(name: str, value: object, what: str) -> Iterable[object]:
    if not isinstance(value, tuple | list):
        raise Wrong(f"gave {name} = {told(value)}: give a tuple of {what}, like (…,)")
    return value


def _step(name: str, step: object) -> None:
    if not isinstance(step, Step):
        raise Wrong(f"gave {name} = {told(step)}: give a Step")
    _text(f"{name}.tool", step.tool)
    _text(f"{name}.told", step.told)
    if not isinstance(step.call, Mapping):
        if not isinstance(step.call, str):
            raise Wrong(f"gave {name}.call = {told(step.call)}: give text, or a dict of arguments")
        _text(f"{name}.call", step.call)


def _files(files: object) -> None:
    if not isinstance(files, Mapping):
        raise Wrong(f"gave files = {told(files)}: give a dict from path to text")
    for path, text in files.items():
        _text("a path of files", path)
        _text(f"files[{path!r}]", text)
        if why := misplaced(path):
            raise Wrong(f"gave a file at {told(path)}: {why}")
