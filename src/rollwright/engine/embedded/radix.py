"""The prefix cache: keys and values of token sequences seen before, in a radix tree.

Role: one tree over token ids for each policy version, token-granular. Neighbours: the scheduler matches
prompts against it, copies what it finds into a row of `kv`, and inserts what rows have computed.
Invariants: a path spells the tokens whose KV its blocks hold; an entry is only ever found under its own
version; the tokens held never exceed the capacity. What is found is copied out within the same step, so
nothing needs a lock. Eviction: least recently used leaf first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from torch import Tensor

from rollwright.types import PolicyVersion

TOKEN = 4
"""Bytes of one token in a key: keys are the raw bytes of int32 ids, compared as memory."""


class _Node:
    """An edge and what lies behind it: `key` are its tokens' bytes, `block` float32[…, tokens, head_dim]
    their KV."""

    __slots__ = ("block", "children", "key", "parent", "used")

    def __init__(self, key: bytes, block: Tensor | None, parent: _Node | None, used: int) -> None:
        self.key, self.block, self.parent, self.used = key, block, parent, used
        self.children: dict[bytes, _Node] = {}


class Radix:
    """Holds the KV of at most `capacity` tokens, in blocks of its own that have the token dimension next to
    last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._roots: dict[PolicyVersion, _Node] = {}
        self._time = 0

    def match(self, version: PolicyVersion, key: bytes) -> tuple[int, list[Tensor]]:
        """Length in tokens and KV blocks, in order, of the longest cached prefix of `key` (bytes of int32
        ids)."""
        node, at, inside = self._walk(version, key)
        blocks = []
        while node.block is not None and node.parent is not None:
            whole = inside == len(node.key)
            blocks.append(node.block if whole else node.block[..., : inside // TOKEN, :])
            node = node.parent
            inside = len(node.key)
        return at // TOKEN, blocks[::-1]

    def insert(self, version: PolicyVersion, key: bytes, read: Callable[[int, int], Tensor]) -> None:
        """Add `key`; `read(start, end)` gives a block for the tokens that are missing, which the tree then
        owns. Where even eviction makes too little room, only the beginning is added."""
        node, at, inside = self._walk(version, key)
        if at == len(key):
            return
        if inside < len(node.key):
            node = self._split(node, inside)
        start, missing = at // TOKEN, (len(key) - at) // TOKEN
        if missing > self.capacity - self.tokens:
            self._evict(max(missing, self.capacity // 16), node)
        count = min(missing, self.capacity - self.tokens)
        if count:
            end = at + TOKEN * count
            leaf = _Node(key[at:end], read(start, start + count), node, self._time)
            node.children[leaf.key[:TOKEN]] = leaf
            self.tokens += count

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._roots.clear()
        self.tokens = 0

    def _walk(self, version: PolicyVersion, key: bytes) -> tuple[_Node, int, int]:
        """The last node of the longest match, the bytes of `key` matched, and how many of them lie in that
        node."""
        self._time += 1
        node = self._roots.get(version)
        if node is None:
            node = self._roots[version] = _Node(b"", None, None, self._time)
        at = 0
        while at < len(key):
            child = node.children.get(key[at : at + TOKEN])
            if child is None:
                break
            node, node.used = child, self._time
            if not key.startswith(child.key, at):
                inside = TOKEN * _common(child.key, key, at)
                return node, at + inside, inside
            at += len(child.key)
        return node, at, len(node.key)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge after `at` bytes; gives the new upper node. Both halves are copied, or the
        longer-lived one would keep the memory of both."""
        parent, block = node.parent, node.block
        assert parent is not None and block is not None, "the root has no edge to cut"
        upper = _Node(node.key[:at], block[..., : at // TOKEN, :].clone(), parent, node.used)
        parent.children[upper.key[:TOKEN]] = upper
        node.key, node.block, node.parent = node.key[at:], block[..., at // TOKEN :, :].clone(), upper
        upper.children[node.key[:TOKEN]] = node
        return upper

    def _evict(self, wanted: int, keep: _Node) -> None:
        """Drop leaves until `wanted` tokens fit or only the path to `keep` is left. Many at once, so that
        the search for leaves is paid rarely."""
        heap = [(node.used, id(node), node) for node in self._nodes() if not node.children]
        heapq.heapify(heap)
        while heap and self.capacity - self.tokens < wanted:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            if node is keep or parent is None:
                continue
            self.tokens -= len(node.key) // TOKEN
            del parent.children[node.key[:TOKEN]]
            if not parent.children and parent.parent is not None:
                heapq.heappush(heap, (parent.used, id(parent), parent))

    def _nodes(self) -> list[_Node]:
        nodes = list(self._roots.values())
        for node in nodes:  # grows while it is walked: breadth first
            nodes.extend(node.children.values())
        return nodes

    def check_integrity(self) -> None:
        """Walk everything.

        Raises:
            AssertionError: tokens are miscounted or too many, or an edge is empty, misfiled or without its
            parent.
        """
        held = 0
        for node in self._nodes():
            held += len(node.key) // TOKEN
            for first, child in node.children.items():
                assert child.block is not None and child.key, "an edge holds at least one token"
                assert child.block.shape[-2] * TOKEN == len(child.key), "an edge has KV for each token"
                assert child.key[:TOKEN] == first, "a child is filed under its first token"
                assert child.parent is node, "a child knows its parent"
                assert node.block is None or child.used <= node.used, "a parent is used whenever its child is"
        assert held == self.tokens, f"{held} tokens are held, {self.tokens} counted"
        assert held <= self.capacity, f"{held} tokens exceed the capacity of {self.capacity}"


def _common(edge: bytes, key: bytes, at: int) -> int:
    """Tokens that `edge` and `key[at:]` share at their beginning."""
    count = min(len(edge), len(key) - at) // TOKEN
    differ = np.frombuffer(edge, np.int32, count) != np.frombuffer(key, np.int32, count, at)
    return int(differ.argmax()) if differ.any() else count
