"""What a test opens and `tests/conftest.py` closes when it ends: no test leaves a connection behind."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)

OPENED: list[Closable] = []


def until_end(thing: T) -> T:
    """`thing`, closed at the end of this test."""
    OPENED.append(thing)
    return thing
