"""The prefix cache finds exactly what was put in, under its own version, and never holds too much."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollwright.engine.embedded.radix import Node, Radix
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
    node, length = radix.match(version, key(tokens))
    blocks = [each.block for each in reversed(list(node.up())) if each.block is not None]
    content = torch.cat(blocks).tolist()[:length] if blocks else []
    assert length == len(content)
    assert all(step == version.step for _, step in content), "KV of another version"
    return [int(token) for token, _ in content]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class RadixMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 40), host=st.sampled_from([0, 0, 7, 60]))
    def begin(self, capacity: int, host: int) -> None:
        self.radix = Radix(capacity, host)
        self.known: dict[PolicyVersion, list[list[int]]] = {version: [] for version in VERSIONS}
        self.locks: list[tuple[PolicyVersion, list[int], Node]] = []
        self.overflowed = False

    @rule(version=st.sampled_from(VERSIONS), tokens=sequences)
    def insert(self, version: PolicyVersion, tokens: list[int]) -> None:
        held = found(self.radix, version, tokens)
        room = self.radix.capacity - self.radix.tokens
        start, end = put(self.radix, version, tokens)
        self.overflowed |= len(tokens) - len(held) > room or self.radix.host_tokens > 0
        self.known[version].append(tokens)
        if not self.radix.host_capacity:
            assert start == (len(held) if end else 0), "tokens that were held already were read again"
        free = self.radix.capacity - self.radix.locked
        there = found(self.radix, version, tokens)
        assert there == tokens[: len(there)]
        assert len(there) == len(tokens) or len(there) >= min(len(tokens), free), "room was left unused"

    @rule(version=st.sampled_from(VERSIONS), tokens=sequences)
    def match(self, version: PolicyVersion, tokens: list[int]) -> None:
        held = found(self.radix, version, tokens)
        best = max((common(tokens, known) for known in self.known[version]), default=0)
        assert held == tokens[: len(held)], "the blocks spell something else"
        assert len(held) <= best, "found what was never put in"
        assert self.overflowed or len(held) == best, "lost something without need"

    @rule(version=st.sampled_from(VERSIONS), tokens=sequences)
    def lock(self, version: PolicyVersion, tokens: list[int]) -> None:
        node = self.radix.reach(version, key(tokens))
        self.radix.lock(node)
        self.locks.append((version, tokens[: node.end], node))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        _, _, node = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.radix.unlock(node)

    @rule(version=st.sampled_from(VERSIONS), tokens=sequences)
    def take(self, version: PolicyVersion, tokens: list[int]) -> None:
        node = self.radix.reach(version, key(tokens))
        if node.parent is None or node.children or node.locks:
            return
        block = self.radix.take(node)
        assert [int(token) for token, _ in block.tolist()] == tokens[node.start : node.end]
        self.overflowed = True

    @precondition(lambda self: not self.locks)
    @rule()
    def clear(self) -> None:
        self.radix.clear()
        self.begin(self.radix.capacity, self.radix.host_capacity)

    @invariant()
    def whole(self) -> None:
        self.radix.check_integrity()

    @invariant()
    def what_is_locked_stays(self) -> None:
        for version, tokens, node in self.locks:
            path = b"".join(each.key for each in reversed(list(node.up())))
            assert path == key(tokens) and not any(each.host for each in node.up())
            assert found(self.radix, version, tokens) == tokens


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


def test_what_is_evicted_comes_back_from_the_host_tier() -> None:
    radix = Radix(20, host=20)
    first, second = [1] * 15, [2] * 15
    put(radix, VERSIONS[0], first)
    put(radix, VERSIONS[0], second)
    assert radix.host_tokens == 15 and found(radix, VERSIONS[0], first) == first
    node = radix.reach(VERSIONS[0], key(first))
    assert node.end == 15 and not node.host and radix.host_tokens == 15, "they should have changed places"
    assert found(radix, VERSIONS[0], second) == second
    radix.check_integrity()
