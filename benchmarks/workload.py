"""The multi-turn tool workload: groups that share a prompt, turns, and when each tool's result arrives.

Role: what `prefix.py` plays to our engine and to its rival. Neighbours: `workloads/tools.json` is the kept
file. Invariant: time is counted in decode steps, never in seconds, so that every contender meets the same
arrivals and CPU seconds hold work alone. Where nothing runs, time jumps to the next arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from rollwright.types import Ints

FILE = Path(__file__).resolve().parent / "workloads" / "tools.json"


class Arrivals(msgspec.Struct, frozen=True):
    """A group: the step its members start at, and how many steps each tool of each member takes."""

    start: int
    tools: tuple[tuple[int, ...], ...]


class Workload(msgspec.Struct, frozen=True):
    """The file; `prompt`, `sampled` and `observed` are tokens, of a group and of each turn."""

    about: str
    sampled: int
    observed: int
    prompt: int
    seed: int
    groups: tuple[Arrivals, ...]

    @property
    def rollouts(self) -> int:
        """How many rollouts there are."""
        return sum(len(group.tools) for group in self.groups)

    @property
    def generated(self) -> int:
        """Tokens sampled by all of them."""
        return sum(self.sampled * (len(tools) + 1) for group in self.groups for tools in group.tools)

    @property
    def distinct(self) -> int:
        """Tokens of all histories, a shared prompt counted once."""
        turns = sum(len(tools) + 1 for group in self.groups for tools in group.tools)
        return len(self.groups) * self.prompt + turns * (self.sampled + self.observed)

    @property
    def live(self) -> int:
        """Tokens to keep so that what goes on is not evicted: the prompts, and two turns of each
        rollout. What has ended need not stay."""
        return len(self.groups) * self.prompt + 2 * self.rollouts * (self.sampled + self.observed)


def load(prompt: int, groups: int | None = None) -> Workload:
    """The kept workload with prompts of that many tokens, or only its first groups."""
    kept = msgspec.json.decode(FILE.read_bytes(), type=Workload)
    return msgspec.structs.replace(kept, prompt=prompt, groups=kept.groups[:groups])


@dataclass
class Play:
    """One rollout on its way: its history, the step its next request arrives at, and the tools to come."""

    name: str
    history: Ints
    due: int
    tools: list[int]
    rng: np.random.Generator = field(repr=False)

    def heard(self, sampled: Ints, now: int, observed: int, vocab: int) -> bool:
        """A turn ended at step `now`: append it and the tool's answer; false where it was the last."""
        self.history = np.concatenate((self.history, sampled))
        if not self.tools:
            return False
        answer = self.rng.integers(0, vocab, observed, dtype=np.int32)
        self.history = np.concatenate((self.history, answer))
        self.due = now + self.tools.pop(0)
        return True


def plays(workload: Workload, vocab: int) -> list[Play]:
    """Every rollout at its beginning, in order of arrival."""
    made = []
    for g, group in enumerate(workload.groups):
        prompt = np.random.default_rng((workload.seed, g)).integers(0, vocab, workload.prompt, dtype=np.int32)
        for m, tools in enumerate(group.tools):
            rng = np.random.default_rng((workload.seed, g, m + 1))
            made.append(Play(f"{g}/{m}", prompt, group.start, list(tools), rng))
    return made


@dataclass(frozen=True)
class Asked:
    """A request's prompt, when it was given; with `whole`, also what it had become when it ended."""

    tokens: Ints
    whole: bool = False


class _Node(dict[int, "_Node"]):
    """Tokens that follow here."""


def ideal(log: Iterable[Asked]) -> int:
    """Prompt tokens that a perfect, infinite trie finds over the log in its order; each request leaves at
    least its last token to compute."""
    root, found = _Node(), 0
    for entry in log:
        node, tokens, at = root, entry.tokens.tolist(), 0
        while at < len(tokens) and tokens[at] in node:
            node, at = node[tokens[at]], at + 1
        if not entry.whole:
            found += min(at, len(tokens) - 1)
        for token in tokens[at:]:
            deeper = _Node()
            node[token] = deeper
            node = deeper
    return found
