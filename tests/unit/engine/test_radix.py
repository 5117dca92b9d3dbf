"""The prefix cache finds exactly what was put in, under its own version, and never holds too much."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollwright.engine.embedded.radix import Radix
from rollwright.types import PolicyVersion

VERSIONS = [PolicyVersion(run="r", step=step) for step in range(2)]
sequences = st.lists(st.integers(0, 2), max_size=12)  # few ids: many shared prefixes


def key(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def put(radix: Radix, version: PolicyVersion, tokens: list[int]) -> tuple[int, int]:
    """Insert with blocks whose content is the tokens, tagged with the step; gives the range that was asked
    for."""
    asked = (0, 0)

    def read(start: int, end: int) -> torch.Tensor:
        nonlocal asked
        asked = (start, end)
        return torch.tensor([[float(token), float(version.step)] for token in tokens[start:end]])

    radix.insert(version, key(tokens), read)
    return asked


def found(radix: Radix, version: PolicyVersion, tokens: list[int]) -> list[int]:
    """What the blocks of the longest match spell."""
    length, blocks = radix.match(version, key(tokens))
    content = torch.cat(blocks).tolist() if blocks else []
    assert length == len(content)
    assert all(step == version.step for _, step in content), "KV of another version"
    return [int(token) for token, _ in content]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class RadixMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 40))
    def begin(self, capacity: int) -> None:
        self.radix = Radix(capacity)
        self.known: dict[PolicyVersion, list[list[int]]] = {version: [] for version in VERSIONS}
        self.overflowed = False

    @rule(version=st.sampled_from(VERSIONS), tokens=sequences)
    def insert(self, version: PolicyVersion, tokens: list[int]) -> None:
        held = found(self.radix, version, tokens)
        room = self.radix.capacity - self.radix.tokens
        start, end = put(self.radix, version, tokens)
        self.overflowed |= len(tokens) - len(held) > room
        self.known[version].append(tokens)
        assert start == (len(held) if end else 0), "tokens that were held already were read again"
        whole = tokens[: self.radix.capacity]
        assert found(self.radix, version, tokens) == whole, "what was just inserted is not there"

    @rule(version=st.sampled_from(VERSIONS), tokens=sequences)
    def match(self, version: PolicyVersion, tokens: list[int]) -> None:
        held = found(self.radix, version, tokens)
        best = max((common(tokens, known) for known in self.known[version]), default=0)
        assert held == tokens[: len(held)], "the blocks spell something else"
        assert len(held) <= best, "found what was never put in"
        assert self.overflowed or len(held) == best, "lost something without need"

    @rule()
    def clear(self) -> None:
        self.radix.clear()
        self.begin(self.radix.capacity)

    @invariant()
    def whole(self) -> None:
        self.radix.check_integrity()


RadixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRadix = RadixMachine.TestCase


def test_the_least_recently_used_goes_first() -> None:
    radix = Radix(30)
    a, b, c, d = ([first] * 10 for first in range(4))
    for tokens in (a, b, c):
        put(radix, VERSIONS[0], tokens)
    radix.match(VERSIONS[0], key(a))
    put(radix, VERSIONS[0], d)
    assert [len(found(radix, VERSIONS[0], tokens)) for tokens in (a, b, c, d)] == [10, 0, 10, 10]


def test_a_prefix_in_use_by_many_outlives_its_ends() -> None:
    radix = Radix(20)
    prompt = [7] * 8
    for end in range(6):
        put(radix, VERSIONS[0], [*prompt, *[end] * 5])
    assert found(radix, VERSIONS[0], prompt) == prompt
    assert len(found(radix, VERSIONS[0], [*prompt, *[5] * 5])) == 13


def test_integrity_is_really_checked() -> None:
    radix = Radix(20)
    put(radix, VERSIONS[0], [1, 2, 3])
    radix.tokens += 1
    try:
        radix.check_integrity()
    except AssertionError:
        return
    raise RuntimeError("a miscount passed")
