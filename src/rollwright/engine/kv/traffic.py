"""What rollouts ask of an engine: prompts, turns, and what they have in common.

Role: the statistics a plan is made for, given or learned from rollouts. Neighbours: `plan` uses them;
`rollwright plan kv --from-run` learns them. Invariant: learned figures are means over the rollouts of one
kind; what no rollout shows is not made up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollwright.errors import ConfigError
from rollwright.types import Rollout


@dataclass(frozen=True)
class Traffic:
    """One kind of rollout, in tokens."""

    prompt: int
    """The first prompt, with what is common to all of them."""
    shared: int = 0
    """Its beginning that all rollouts have in common: a system prompt, tools."""
    turns: int = 1
    sampled: int = 256
    """Sampled in each turn."""
    observed: int = 0
    """Appended between two turns: what a tool said."""
    group: int = 1
    """Rollouts of one prompt."""

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("turns", 1), ("sampled", 1), ("group", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} {getattr(self, name)}: expected at least {least}")
        if self.observed < 0 or not 0 <= self.shared <= self.prompt:
            raise ConfigError(
                f"--observed {self.observed} --shared {self.shared}: expected none below 0, and not more "
                f"shared than the prompt has ({self.prompt})"
            )

    @property
    def length(self) -> int:
        """Tokens of a whole rollout."""
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observed

    @property
    def mean(self) -> int:
        """Tokens of a rollout while it decodes, on average."""
        return (self.prompt + self.length + 1) // 2


@dataclass(frozen=True)
class Learned:
    """Traffic as rollouts showed it, and how many they were."""

    traffic: Traffic
    rollouts: int
    longest: int
    """Tokens of the longest row."""


def learned(rollouts: Iterable[Rollout], group: int) -> Learned:
    """The traffic of `rollouts` that came in groups of `group`: prompts and turns are means, rounded up; what
    is shared is the common beginning of all prompts.

    Raises:
        ConfigError: none of them has a prompt and a turn.
    """
    prompts, turns, sampled, observed, longest = [], [], [], [], 0
    common: list[int] | None = None
    for rollout in rollouts:
        if not rollout.turns or not rollout.rows:
            continue
        row, said = rollout.rows[0], sum(turn.end - turn.start for turn in rollout.turns)
        start = rollout.turns[0].start
        prompts.append(start)
        turns.append(len(rollout.turns))
        sampled.append(said / len(rollout.turns))
        if len(rollout.turns) > 1:
            observed.append((rollout.turns[-1].end - start - said) / (len(rollout.turns) - 1))
        longest = max(longest, max(len(each.tokens) for each in rollout.rows))
        ids = row.tokens[:start].tolist()
        common = ids if common is None else common[: _common(common, ids)]
    if common is None:
        raise ConfigError(
            "no rollout of this run has a turn yet: give --prompt, --turns and --sampled instead"
        )
    traffic = Traffic(
        prompt=_mean(prompts),
        shared=min(len(common), _mean(prompts)),
        turns=_mean(turns),
        sampled=max(1, _mean(sampled)),
        observed=_mean(observed) if observed else 0,
        group=group,
    )
    return Learned(traffic, len(prompts), longest)


def _mean(values: list[int] | list[float]) -> int:
    return int(np.ceil(np.mean(values) - 1e-9))


def _common(first: list[int], second: list[int]) -> int:
    count = min(len(first), len(second))
    differ = np.flatnonzero(np.not_equal(first[:count], second[:count]))
    return int(differ[0]) if len(differ) else count
