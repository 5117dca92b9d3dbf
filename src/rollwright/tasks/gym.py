"""Tasks of the package `reasoning-gym`: any of its data sets whose scorer is safe to ask, by name.

Role: the adapter, and the scorer that its tasks name. Neighbours: `config` holds the settings, the reward
asks `GymScorer` through the check `scored_by`. Invariants: no held-out question is a train question; the
package's own scorer decides; only scorers that compare text and numbers are asked, because several others
evaluate what the agent answered as Python.

An item is made from its generator seed + number, so the splits have seeds 2³³ apart. Questions of small data
sets repeat all the same: a train number whose question is held out moves on to another one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from typing import Any

from rollwright.errors import ConfigError, MissingExtra
from rollwright.tasks.base import Demonstration, Split
from rollwright.tasks.config import GymConfig
from rollwright.tasks.pieces import pieces_of
from rollwright.types import Json, Message, ScoredBy, Task
from rollwright.values import shown

SEEDS = 2**34
"""Generator seeds of one `seed`; the lower half is `train`, the upper one `heldout`."""
SIZE = 2**31 - 1
"""Items that a data set is said to have."""
STRIDE, MOVES = 50_000_000, 20
"""How a train number moves on when its question is held out: by this, so often."""
SAMPLES = 300
"""Train tasks that the tokenizer's pieces are read from."""

# fmt: off
REVIEWED = frozenset(
    (
        "ab", "chain_sum", "color_cube_rotation", "decimal_arithmetic", "decimal_chain_sum", "dice",
        "emoji_mystery", "family_relationships", "letter_jumble", "manipulate_matrix",
        "needle_haystack", "number_format", "path_star", "products", "rectangle_count",
        "sentence_reordering", "spell_backward", "tsumego", "word_sorting",
    )
)
# fmt: on
"""Data sets with a scorer of their own that was read and only compares text and numbers (0.1.25)."""

UNREVIEWED = "its scorer was not reviewed, and some of the package's evaluate the answer as Python"
LEFT_OUT = dict.fromkeys(
    ("acre", "gsm_symbolic", "list_functions"), "it makes all its items before the first one can be taken"
)
LEFT_OUT["bf"] = "it writes to the terminal"
LEFT_OUT |= dict.fromkeys(
    ("isomorphic_strings", "ransom_note"),
    "it draws in the order of sets, so a task would be another one in another process",
)
"""Data sets that are not offered for another reason than their scorer."""


@cache
def data_sets() -> dict[str, str]:
    """Name → why it is not offered; "" where it is: its scorer is the package's plain comparison, or
    `REVIEWED`.

    Raises:
        MissingExtra: the package is not installed.
    """
    try:
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("tasks.type = 'reasoning_gym'", "reasoning-gym") from error
    plain = ProceduralDataset.score_answer
    return {
        name: LEFT_OUT.get(name) or ("" if name in REVIEWED or kind.score_answer is plain else UNREVIEWED)
        for name, (kind, _) in sorted(DATASETS.items())
    }


@lru_cache(maxsize=32)
def _data_set(name: str, parameters: str, seed: int) -> Any:
    known = data_sets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"tasks.dataset = '{name}': no data set of reasoning-gym; {hint}")
    if known[name]:
        offered = ", ".join(each for each, why in known.items() if not why)
        raise ConfigError(f"tasks.dataset = '{name}': {known[name]}; take one of {offered}")
    from reasoning_gym import create_dataset

    given = json.loads(parameters)
    try:
        return create_dataset(name, seed=seed, size=SIZE, **given)
    except (TypeError, AssertionError, ValueError) as error:
        raise _not_taken(name, given, error) from error


def _not_taken(name: str, given: Mapping[str, Json], error: Exception) -> ConfigError:
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"tasks.parameters = {shown_table(given)}: '{name}' does not take them ({what})")


def shown_table(given: Mapping[str, Json]) -> str:
    """Parameters as TOML would have them, in one line."""
    return "{ " + ", ".join(f"{name} = {shown(value)}" for name, value in given.items()) + " }"


def data_set(name: str, parameters: Mapping[str, Json], seed: int) -> Any:
    """A data set of the package; the same one for the same arguments.

    Raises:
        ConfigError: unknown, without a safe scorer, or parameters that it does not take.
        MissingExtra: the package is not installed.
    """
    try:
        written = json.dumps(dict(parameters), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"tasks.parameters = {shown_table(parameters)}: expected finite numbers, text, true or false, "
            f"lists and tables ({error})"
        ) from error
    return _data_set(name, written, seed)


class GymScorer:
    """Asks a data set's own scorer about an answer."""

    def score(self, arguments: Mapping[str, Json], answer: str) -> float:
        """0 to 1. `arguments`: `dataset`, `parameters`, `seed`, `number`, as `GymTasks` writes them.

        Raises:
            ConfigError: as `data_set`.
        """
        made = data_set(arguments["dataset"], arguments["parameters"], int(arguments["seed"]))
        return float(made.score_answer(answer, made[int(arguments["number"])]))


class GymTasks:
    """The task set `reasoning_gym`."""

    name = "reasoning_gym"

    def __init__(self, config: GymConfig) -> None:
        self.config = config
        self._seeds: dict[Split, int] = {
            "train": config.seed * SEEDS,
            "heldout": config.seed * SEEDS + SEEDS // 2,
        }
        self._entry("train", 0)  # a wrong name or parameter is told here

    def task(self, split: Split, number: int) -> Task:
        """Task `number` ≥ 0 of a split.

        Raises:
            ConfigError: `heldout` has no task of that number.
        """
        index = self._index(split, number)
        question, _ = self._entry(split, index)
        config = self.config
        arguments: dict[str, Json] = {
            "dataset": config.dataset,
            "parameters": dict(config.parameters),
            "seed": self._seeds[split],
            "number": index,
        }
        return Task(
            id=f"{self.name}/{config.dataset}/{config.seed}/{split}/{number}",
            set=self.name,
            messages=(Message(role="user", content=question),),
            tools=config.tools,
            checks=(ScoredBy(scorer=self.name, arguments=arguments, at_least=config.at_least),),
            limits=config.limits.build(),
            tags={"dataset": config.dataset},
        )

    def demonstrate(self, task: Task, number: int) -> Demonstration:
        """The package's own answer, without a call."""
        *_, split, index = task.id.split("/")
        where: Split = "heldout" if split == "heldout" else "train"
        return Demonstration(calls=(), answer=self._entry(where, self._index(where, int(index)))[1])

    def pieces(self) -> tuple[str, ...]:
        """Text pieces that a small tokenizer should know as one token, read from sample train tasks."""
        return self._pieces

    @cached_property
    def _pieces(self) -> tuple[str, ...]:
        return pieces_of([self._entry("train", SIZE - 1 - number) for number in range(SAMPLES)])

    def _entry(self, split: Split, index: int) -> tuple[str, str]:
        """(question, answer) of an item."""
        config = self.config
        made = data_set(config.dataset, config.parameters, self._seeds[split])
        try:
            entry = made[index]
        except Exception as error:  # boundary: the package reads some parameters only when it makes an item
            raise _not_taken(config.dataset, config.parameters, error) from error
        return str(entry["question"]), str(entry["answer"])

    def _index(self, split: Split, number: int) -> int:
        """The item that a task's number means."""
        if split == "heldout":
            if number >= len(self._heldout):
                raise ConfigError(
                    f"{self.name} keeps tasks.heldout = {len(self._heldout)} held-out tasks, number {number} "
                    "was asked for: raise tasks.heldout or lower evaluation.tasks"
                )
            return list(self._heldout.values())[number]
        for move in range(MOVES):
            index = (number + move * STRIDE) % SIZE
            if self._entry("train", index)[0] not in self._heldout:
                return index
        raise ConfigError(
            f"tasks.dataset = '{self.config.dataset}': {MOVES} train questions in a row are held out; with "
            "these parameters it has too few different ones: lower tasks.heldout or widen tasks.parameters"
        )

    @cached_property
    def _heldout(self) -> dict[str, int]:
        """Held-out question → item, all different."""
        found: dict[str, int] = {}
        for index in range(20 * self.config.heldout):
            found.setdefault(self._entry("heldout", index)[0], index)
            if len(found) == self.config.heldout:
                return found
        raise ConfigError(
            f"tasks.dataset = '{self.config.dataset}' has only about {len(found)} different questions with "
            f"these parameters, tasks.heldout = {self.config.heldout}: lower it or widen tasks.parameters"
        )
