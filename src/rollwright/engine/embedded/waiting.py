"""Who waits, and who goes first.

Role: the order of admission. Neighbours: the scheduler. Invariants: a higher priority goes first; among
equals the one with the longest cached prefix; one that was passed by often enough goes before all of its
priority, so nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollwright.engine.embedded.request import Request

PATIENCE = 16
"""How often a request is passed by before it goes first."""
WINDOW = 64
"""How many of the oldest are compared at once."""


class Waiting:
    """Requests without a row, oldest first within a priority."""

    def __init__(self) -> None:
        self._all: list[Request] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all)

    @property
    def since(self) -> int:
        """The step at which the first of them began to wait."""
        return min(request.came for request in self._all)

    def add(self, request: Request) -> None:
        """Behind all of its priority or a higher one."""
        at = len(self._all)
        while at and self._all[at - 1].priority < request.priority:
            at -= 1
        self._all.insert(at, request)

    def put_back(self, requests: list[Request]) -> None:
        """Those that ran already: before all of their priority, in this order."""
        for request in reversed(requests):
            at = 0
            while at < len(self._all) and self._all[at].priority > request.priority:
                at += 1
            self._all.insert(at, request)

    def remove(self, request: Request) -> None:
        """It got a row, or its caller is gone."""
        self._all.remove(request)

    def ordered(self, cached: Callable[[Request], int]) -> list[Request]:
        """The oldest of them, in the order in which they should go; `cached` says how long a prefix of one is
        there."""
        head = self._all[:WINDOW]
        if len(head) < 2:
            return head
        rank = {
            id(r): (-r.priority, 0 if r.passed >= PATIENCE else 1, 0 if r.passed >= PATIENCE else -cached(r))
            for r in head
        }
        return sorted(head, key=lambda r: rank[id(r)])

    def passed_by(self, admitted: Request) -> None:
        """`admitted`, which still waits, goes: those before it were passed by."""
        for request in self._all:
            if request is admitted:
                return
            request.passed += 1
