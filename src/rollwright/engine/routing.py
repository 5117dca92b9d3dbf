"""Which replica has a prefix in its cache, as far as a client can know.

Role: `replicas` asks it for each request. Neighbours: none. Invariant: what it remembers is bounded; a wrong
guess costs time, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from rollwright.types import Ints

BLOCK = 16
"""Tokens of a prefix that are remembered together."""
BLOCKS = 1 << 16
"""Blocks remembered, all replicas together; the least recently used are forgotten beyond."""
SESSIONS = 1 << 14


class Routing:
    """`slack`: how many requests more than the least busy replica may have the one where the prefix lies,
    before the request goes to the least busy."""

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._where: OrderedDict[int, int] = OrderedDict()  # prefix → the replica that computed it last
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, load: Mapping[int, int], prompt: Ints, session: str) -> int:
        """One of `load` (replica → requests it has): where the session was last, else where most of the
        prefix lies, else the least busy. It is remembered at once: siblings come before it has ended."""
        least = min(load, key=lambda number: (load[number], number))
        chosen = self._sessions.get(session, -1) if session else -1
        if chosen not in load:
            held = (self._where.get(key, -1) for key in reversed(_prefixes(prompt)))
            chosen = next((number for number in held if number in load), least)
        if load[chosen] > load[least] + self._slack:
            chosen = least
        self.remember(chosen, prompt, session)
        return chosen

    def remember(self, number: int, tokens: Ints, session: str) -> None:
        """Replica `number` has computed `tokens`."""
        for key in _prefixes(tokens):
            self._where[key] = number
            self._where.move_to_end(key)
        while len(self._where) > BLOCKS:
            self._where.popitem(last=False)
        if session:
            self._sessions[session] = number
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)

    def forget(self) -> None:
        """New weights: no cache holds anything. Sessions stay where they are."""
        self._where.clear()


def _prefixes(tokens: Ints) -> list[int]:
    """A key for the prefix that ends with each block, shortest first; the last block may be a part of one."""
    keys, key = [], 0
    for start in range(0, len(tokens), BLOCK):
        key = hash((key, tokens[start : start + BLOCK].tobytes()))
        keys.append(key)
    return keys
