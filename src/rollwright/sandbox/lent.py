"""A sandbox that a pool gave out.

Role: stands before the sandbox itself. Neighbours: `pool`. Invariants: it adds nothing but word to the pool:
of its end, which frees room, and of a fork, which needs some; once killed it is gone for the pool too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollwright.sandbox.base import Files, Guarantees, Info, Limits, Sandbox, Snapshot
from rollwright.types import ExecResult, Json


class Lender(Protocol):
    """Who gave it out."""

    async def forked(self, sandbox: Sandbox, count: int, live: bool) -> list[Sandbox]:
        """Its forks, after room was made for them."""

    def ended(self, id: str) -> None:
        """It was killed."""


class Lent:
    """See `Sandbox`."""

    def __init__(self, sandbox: Sandbox, lender: Lender) -> None:
        self.id = sandbox.id
        self.limits: Limits = sandbox.limits
        self._sandbox, self._lender = sandbox, lender

    @property
    def files(self) -> Files:
        return self._sandbox.files

    @property
    def guarantees(self) -> Guarantees:
        return self._sandbox.guarantees

    def info(self) -> Info:
        return self._sandbox.info()

    async def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        return await self._sandbox.exec(command, timeout=timeout, stdin=stdin)

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        return await self._sandbox.run_code(code, timeout=timeout)

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        return await self._sandbox.sql(query, timeout=timeout, parameters=parameters)

    async def snapshot(self) -> Snapshot:
        return await self._sandbox.snapshot()

    async def restore(self, snapshot: Snapshot) -> None:
        await self._sandbox.restore(snapshot)

    async def fork(self, count: int = 1, *, live: bool = False) -> list[Sandbox]:
        return await self._lender.forked(self._sandbox, count, live)

    async def pause(self) -> None:
        await self._sandbox.pause()

    async def resume(self) -> None:
        await self._sandbox.resume()

    async def set_timeout(self, seconds: float | None) -> None:
        await self._sandbox.set_timeout(seconds)

    async def kill(self) -> None:
        await self._sandbox.kill()
        self._lender.ended(self.id)
