"""The prefix cache: keys and values of shared and resting token sequences, in a radix tree.

Role: one tree over token ids for each policy version, token-granular. Neighbours: the scheduler matches
prompts against it, locks what running requests read in place, takes out what only one of them reads, and
gives back what they computed; `attend` reads the blocks of locked nodes. Invariants: a path spells the
tokens whose KV its blocks hold; an entry is only ever found under its own version; the tokens held never
exceed the capacity of their tier; a locked node is on the device and stays; so does all above it.

Eviction is least recently used leaf first. What the device evicts goes to the host tier, if that has room,
and comes back when it is matched.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from rollwright.types import PolicyVersion

TOKEN = 4
"""Bytes of one token in a key: keys are the raw bytes of int32 ids, compared as memory."""


Views = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, float[1, kv_heads, tokens, head_dim]."""


class Node:
    """An edge and what lies behind it: `key` are its tokens' bytes, `block` float[…, tokens, head_dim] their
    KV, on the device or (`host`) in the host tier. `end` tokens lead from the root to its end; `locks`
    running requests read it in place."""

    __slots__ = ("_block", "_views", "children", "end", "host", "key", "locks", "parent", "used")

    def __init__(self, key: bytes, block: Tensor | None, parent: Node | None, used: int) -> None:
        self.key, self.block, self.parent, self.used = key, block, parent, used
        self.children: dict[bytes, Node] = {}
        self.locks, self.host = 0, False
        self.end: int = (parent.end if parent else 0) + len(key) // TOKEN

    def __len__(self) -> int:
        return len(self.key) // TOKEN

    @property
    def start(self) -> int:
        """Tokens before it."""
        return self.end - len(self)

    @property
    def block(self) -> Tensor | None:
        """None at a root."""
        return self._block

    @block.setter
    def block(self, block: Tensor | None) -> None:
        self._block = block
        self._views: Views | None = None  # they would keep the memory of the block before

    def views(self) -> Views:
        """Its block by layer, as attention takes it; made once for as long as the block is the same."""
        assert self._block is not None, "the root holds nothing"
        if self._views is None:
            self._views = [(layer[0].unsqueeze(0), layer[1].unsqueeze(0)) for layer in self._block]
        return self._views

    def up(self) -> Iterator[Node]:
        """The path from here to the root, which is left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Radix:
    """Holds the KV of at most `capacity` tokens, and of `host` more in the host tier, in blocks of its own
    that have the token dimension next to last. `to_host` and `to_device` copy a block between the tiers."""

    def __init__(
        self,
        capacity: int,
        host: int = 0,
        to_host: Callable[[Tensor], Tensor] = Tensor.clone,
        to_device: Callable[[Tensor], Tensor] = Tensor.clone,
    ) -> None:
        self.capacity, self.host_capacity = capacity, host
        self.tokens = self.host_tokens = self.locked = 0
        """Tokens on the device, in the host tier, and on the device under a lock."""
        self._to_host, self._to_device = to_host, to_device
        self._roots: dict[PolicyVersion, Node] = {}
        self._time = 0
        self._wanted: set[Node] = set()  # on its way back from the host tier

    def match(self, version: PolicyVersion, key: bytes) -> tuple[Node, int]:
        """The last node of the longest cached prefix of `key` (bytes of int32 ids), and how many tokens of
        `key` it is; they may end inside the node."""
        node, at, _ = self._walk(version, key)
        return node, at // TOKEN

    def reach(self, version: PolicyVersion, key: bytes) -> Node:
        """The node that ends where the longest cached prefix of `key` ends, split off where there was none,
        with everything on its way on the device. Where the host tier's part doesn't fit there, an earlier
        one."""
        node, _, inside = self._walk(version, key)
        if inside < len(node.key):
            node = self._split(node, inside)
        away = [each for each in node.up() if each.host]
        self._wanted = set(away)
        try:
            for each in reversed(away):
                assert each.parent is not None, "the root is never away"
                self.lock(each.parent)
                self.host_tokens -= len(each)  # so that what makes room for it may go where it was
                fits = self.room(len(each))
                self.host_tokens += len(each)
                self.unlock(each.parent)
                if not fits:
                    if self.host_tokens > self.host_capacity:
                        self._drop(each)
                    return each.parent
                self._promote(each)
        finally:
            self._wanted = set()
        return node

    def lock(self, node: Node | None) -> None:
        """Keep `node` and all above it."""
        for each in node.up() if node else ():
            each.locks += 1
            self.locked += len(each) if each.locks == 1 else 0

    def unlock(self, node: Node | None) -> None:
        """Undo one `lock`."""
        for each in node.up() if node else ():
            each.locks -= 1
            self.locked -= len(each) if each.locks == 0 else 0

    def take(self, node: Node) -> Tensor:
        """Remove a leaf that nobody else reads; its block belongs to the caller."""
        assert not node.children and not node.locks and node.block is not None, "only a free leaf is taken"
        block = node.block
        self._remove(node)
        return block

    def join(self, node: Node) -> None:
        """Make one node of `node` and the only one above it that nobody else reads or goes on from."""
        above = node.parent
        assert above is not None and above.parent is not None, "the root has no block"
        assert len(above.children) == 1 and above.locks == node.locks and not (above.host or node.host)
        assert above.block is not None and node.block is not None, "only the root is empty"
        node.block = torch.cat((above.block, node.block), -2)
        node.key, node.parent = above.key + node.key, above.parent
        above.parent.children[node.key[:TOKEN]] = node

    def trim(self, node: Node, tokens: int) -> None:
        """Forget all but the first `tokens` of a free leaf."""
        assert not node.children and not node.locks and node.block is not None, "only a free leaf is trimmed"
        gone = len(node) - tokens
        node.key, node.block = node.key[: tokens * TOKEN], node.block[..., :tokens, :].clone()
        node.end -= gone
        if node.host:
            self.host_tokens -= gone
        else:
            self.tokens -= gone

    def insert(self, version: PolicyVersion, key: bytes, read: Callable[[int, int], Tensor]) -> Node:
        """Add `key`; `read(start, end)` gives a block for the tokens that are missing, which the tree then
        owns. Gives the node at its end. Where even eviction makes too little room, only the beginning is
        added."""
        node = self.reach(version, key)
        start, at = node.end, node.end * TOKEN
        if at == len(key):
            return node
        missing = len(key) // TOKEN - start
        self.lock(node)
        self.room(missing)
        self.unlock(node)
        count = min(missing, self.capacity - self.tokens)
        if not count:
            return node
        stale = node.children.get(key[at : at + TOKEN])
        if stale is not None:  # in the host tier, and there was no room to bring it back
            self._drop(stale)
        leaf = Node(key[at : at + TOKEN * count], read(start, start + count), node, self._time)
        node.children[leaf.key[:TOKEN]] = leaf
        self.tokens += count
        return leaf

    def room(self, tokens: int) -> bool:
        """Evict until `tokens` more fit on the device; whether they do."""
        if tokens > self.capacity - self.tokens:
            self._evict(min(max(tokens, self.capacity // 16), self.capacity - self.locked))
        return tokens <= self.capacity - self.tokens

    def clear(self) -> None:
        """Forget everything: the weights changed, and nothing is locked."""
        assert self.locked == 0, "somebody still reads the cache"
        self._roots.clear()
        self.tokens = self.host_tokens = 0

    def _walk(self, version: PolicyVersion, key: bytes) -> tuple[Node, int, int]:
        """The last node of the longest match, the bytes of `key` matched, and how many of them lie in that
        node."""
        self._time += 1
        node = self._roots.get(version)
        if node is None:
            node = self._roots[version] = Node(b"", None, None, self._time)
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

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after `at` bytes; gives the new upper node. Both halves are copied, or the
        longer-lived one would keep the memory of both. Who reads the node keeps its end."""
        parent, block = node.parent, node.block
        assert parent is not None and block is not None, "the root has no edge to cut"
        upper = Node(node.key[:at], block[..., : at // TOKEN, :].clone(), parent, node.used)
        upper.locks, upper.host = node.locks, node.host
        parent.children[upper.key[:TOKEN]] = upper
        node.key, node.block, node.parent = node.key[at:], block[..., at // TOKEN :, :].clone(), upper
        upper.children[node.key[:TOKEN]] = node
        return upper

    def _evict(self, wanted: int) -> None:
        """Take leaves of the device tier away until `wanted` tokens fit or all that is left is locked. Many
        at once, so that the search for leaves is paid rarely."""
        own = [node for node in self._nodes() if node.parent is not None and not node.host and not node.locks]
        heap = [(n.used, id(n), n) for n in own if all(child.host for child in n.children.values())]
        heapq.heapify(heap)
        while heap and self.capacity - self.tokens < wanted:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            self._demote(node)
            if (
                parent is not None
                and parent.parent is not None
                and not parent.locks
                and all(child.host for child in parent.children.values())
            ):
                heapq.heappush(heap, (parent.used, id(parent), parent))

    def _demote(self, node: Node) -> None:
        """Move a node to the host tier; with what hangs below it, drop it where that has no room."""
        if len(node) <= self.host_capacity and self._host_room(len(node), node):
            assert node.block is not None, "the root is never evicted"
            node.block, node.host = self._to_host(node.block), True
            self.tokens -= len(node)
            self.host_tokens += len(node)
            return
        for below in list(node.children.values()):
            self._drop(below)
        self._remove(node)

    def _promote(self, node: Node) -> None:
        assert node.block is not None, "the root is never away"
        node.block, node.host = self._to_device(node.block), False
        self.host_tokens -= len(node)
        self.tokens += len(node)

    def _host_room(self, tokens: int, but: Node) -> bool:
        """Drop the least recently used leaves of the host tier until `tokens` fit; not those below `but`."""
        if tokens > self.host_capacity - self.host_tokens:
            wanted = max(tokens, self.host_capacity // 16)
            leaves = [node for node in self._nodes() if node.host and not node.children]
            heap = [(n.used, id(n), n) for n in leaves if n not in self._wanted and but not in n.up()]
            heapq.heapify(heap)
            while heap and self.host_capacity - self.host_tokens < wanted:
                _, _, node = heapq.heappop(heap)
                parent = node.parent
                self._remove(node)
                if parent is not None and parent.host and not parent.children and parent not in self._wanted:
                    heapq.heappush(heap, (parent.used, id(parent), parent))
        return tokens <= self.host_capacity - self.host_tokens

    def _drop(self, node: Node) -> None:
        for child in list(node.children.values()):
            self._drop(child)
        self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children and not node.locks, "only free leaves are removed"
        if node.host:
            self.host_tokens -= len(node)
        else:
            self.tokens -= len(node)
        del parent.children[node.key[:TOKEN]]

    def _nodes(self) -> list[Node]:
        nodes = list(self._roots.values())
        for node in nodes:  # grows while it is walked: breadth first
            nodes.extend(node.children.values())
        return nodes

    def check_integrity(self) -> None:
        """Walk everything.

        Raises:
            AssertionError: tokens are miscounted or too many, an edge is empty, misfiled or without its
            parent, or a lock or the device tier has a hole above it.
        """
        held = {False: 0, True: 0}
        locked = 0
        for node in self._nodes():
            held[node.host] += len(node)
            locked += len(node) if node.locks else 0
            for first, child in node.children.items():
                assert child.block is not None and child.key, "an edge holds at least one token"
                assert child.block.shape[-2] == len(child), "an edge has KV for each token"
                assert child.key[:TOKEN] == first, "a child is filed under its first token"
                assert child.parent is node and child.end == node.end + len(child), "a child knows its place"
                assert node.parent is None or child.used <= node.used, (
                    "a parent is used whenever its child is"
                )
                assert node.parent is None or child.locks <= node.locks, "a lock holds all above it"
                assert child.host or not node.host, "nothing on the device hangs below the host tier"
            assert not (node.host and node.locks), "a locked node is on the device"
        assert held[False] == self.tokens, f"{held[False]} tokens are held, {self.tokens} counted"
        assert held[True] == self.host_tokens, (
            f"{held[True]} tokens are on the host, {self.host_tokens} counted"
        )
        assert locked == self.locked, f"{locked} tokens are locked, {self.locked} counted"
        assert self.tokens <= self.capacity, f"{self.tokens} tokens exceed the capacity of {self.capacity}"
        assert self.host_tokens <= self.host_capacity, f"{self.host_tokens} exceed {self.host_capacity}"


def _common(edge: bytes, key: bytes, at: int) -> int:
    """Tokens that `edge` and `key[at:]` share at their beginning."""
    count = min(len(edge), len(key) - at) // TOKEN
    differ = np.frombuffer(edge, np.int32, count) != np.frombuffer(key, np.int32, count, at)
    return int(differ.argmax()) if differ.any() else count
