"""Sandboxes in memory that can be made ahead, and a provider of them with room for only so many.

Role: a fake under `SandboxPool`. Neighbours: its tests. Invariants: it waits for room, without end,
and writes down whatever a pool must not do in `wrong`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from rollwright.clock import Clock
from rollwright.errors import SandboxError, SandboxUnavailable
from rollwright.sandbox.base import GuaranteeName, Limits, Snapshot, State
from rollwright.testing.memory_sandboxes import NONE_KEPT, MemorySandbox, MemorySandboxes
from rollwright.types import Environment


class WarmSandbox(MemorySandbox):
    """One that can be made before it is known what for."""

    adopted = False
    blank = True
    pings = 0

    async def ping(self) -> None:
        """See `Warm`."""
        await self.home.dawdle()
        self.pings += 1
        self.check()

    async def adopt(self, environment: Environment, owner: str) -> None:
        """See `Warm`."""
        if self.adopted or not self.blank:
            self.home.wrong.append(f"{self.id} was used before")
        if not self.pings:
            self.home.wrong.append(f"{self.id} was not asked whether it lives")
        self.adopted, self.blank = True, False
        await self.home.dawdle()
        self.check()
        self._owner = owner
        self.begin(environment)

    @property
    def home(self) -> WarmSandboxes:
        """Its provider."""
        assert isinstance(self._provider, WarmSandboxes)
        return self._provider

    async def kill(self) -> None:
        if self._state is not State.KILLED:
            await self.home.dawdle()
            await super().kill()


class WarmSandboxes(MemorySandboxes):
    """Room for `room`. `rng` says how many turns of the loop each step takes; none: it takes none."""

    kind: type[MemorySandbox] = WarmSandbox

    def __init__(
        self,
        room: int,
        clock: Clock,
        *,
        fault: Callable[[str], None] | None = None,
        rng: random.Random | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(fault, clock)
        self._room, self._rng, self._limits = room, rng, limits or Limits()
        self._places = asyncio.Semaphore(room)
        self.wrong: list[str] = []
        self.most = 0
        """The most that were alive at once."""

    @property
    def capacity(self) -> int:
        return self._room

    async def dawdle(self) -> None:
        """Give way a few times."""
        for _ in range(self._rng.randrange(4) if self._rng else 0):
            await asyncio.sleep(0)

    async def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: Snapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> MemorySandbox:
        self.owners.append(owner)
        if missing := NONE_KEPT.missing(require):
            raise SandboxUnavailable(f"not kept: {missing}")
        if network != "none":
            raise SandboxError(f"no network {network}")
        await self._places.acquire()
        sandbox = self.kind(self, self.name("s"), owner, limits or self._limits)
        self.open[sandbox.id] = sandbox
        self.most = max(self.most, len(self.open))
        try:
            await self.dawdle()
            if self._fault is not None:
                self._fault(owner)
            sandbox.begin(environment or Environment())
            if snapshot is not None:
                await sandbox.restore(snapshot)
            if isinstance(sandbox, WarmSandbox):
                sandbox.blank = environment is None and snapshot is None
            await sandbox.set_timeout(sandbox.limits.wall_seconds)
        except BaseException:  # boundary: nothing half-made stays
            await MemorySandbox.kill(sandbox)
            raise
        return sandbox

    def forget(self, sandbox: MemorySandbox) -> None:
        if sandbox.id in self.open:
            self._places.release()
        super().forget(sandbox)
