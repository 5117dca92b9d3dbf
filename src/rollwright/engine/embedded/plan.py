"""What one step computes, and where each token finds the history it sees.

Role: drawn up by the scheduler, carried out by `attend`. Neighbours: `batch` (rows), `radix` (nodes read in
place). Invariant: what a token sees, its own row up to itself and its row's path in the tree, is spelled
once: no position lies in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rollwright.engine.embedded.kv import Index
from rollwright.engine.embedded.radix import Node, Views


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of a prompt, which are computed together."""

    row: int
    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """A node that some of a step's tokens read in place; `tokens` int64[n] are their numbers in the plan."""

    views: Views
    start: int
    end: int
    """Position behind its last."""
    tokens: Index


Levels = tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Tokens of one step: first one for each decoding row, then the chunks of prompts."""

    rows: Index
    """int64[N]: each token's row."""
    positions: Index
    """int64[N]: each token's position in its history."""
    places: Index
    """int64[N]: its place in the row."""
    decoding: int
    """How many of the N decode; their rows ascend."""
    chunks: tuple[Chunk, ...]
    """In the order of their tokens."""
    levels: Levels
    """What is read in place: each token at most once in each level."""
    repeated: bool = False
    """Whether the step before was the same, a token earlier."""

    @property
    def alike(self) -> bool:
        """Whether all that is computed is one token of each row. Then every row in use decodes."""
        return not self.chunks

    @cached_property
    def width(self) -> int:
        """Rows up to the last it uses."""
        return int(self.rows.max()) + 1

    @cached_property
    def reach(self) -> int:
        """Places up to the last it writes."""
        return int(self.places.max()) + 1

    def firsts(self) -> Iterator[tuple[Chunk, int]]:
        """Each chunk and the number of its first token."""
        number = self.decoding
        for chunk in self.chunks:
            yield chunk, number
            number += chunk.end - chunk.start

    def next(self) -> Plan:
        """One token further, where all are `alike`."""
        later = Plan(self.rows, self.positions + 1, self.places + 1, self.decoding, (), self.levels, True)
        later.__dict__.update(width=self.width, reach=self.reach + 1)
        return later


def draw(
    decoding: Index, chunks: Sequence[Chunk], computed: Index, base: Index, nodes: Sequence[Node | None]
) -> Plan:
    """The plan for one token of each row in `decoding` (int64[n], ascending) and the chunks. `computed`,
    `base` and `nodes` are those of all rows."""
    where, at = decoding, computed[decoding]
    if chunks:
        sizes = [chunk.end - chunk.start for chunk in chunks]
        where = np.concatenate((where, np.repeat([chunk.row for chunk in chunks], sizes)))
        at = np.concatenate((at, *(np.arange(chunk.start, chunk.end) for chunk in chunks)))
    readers: list[dict[Node, list[int]]] = []

    def reads(row: int, first: int, count: int) -> None:
        node = nodes[row]
        for level, each in enumerate(node.up() if node is not None else ()):
            if level == len(readers):
                readers.append({})
            readers[level].setdefault(each, []).extend(range(first, first + count))

    if any(nodes):
        for i, row in enumerate(decoding.tolist()):
            reads(row, i, 1)
    first = len(decoding)
    for chunk in chunks:
        reads(chunk.row, first, chunk.end - chunk.start)
        first += chunk.end - chunk.start
    levels = tuple(tuple(_segment(node, tokens) for node, tokens in level.items()) for level in readers)
    return Plan(where, at, at - base[where], len(decoding), tuple(chunks), levels)


def _segment(node: Node, tokens: list[int]) -> Segment:
    return Segment(node.views(), node.start, node.end, np.array(tokens, np.int64))
