"""Providers of sandboxes that are folders of this machine: behind the kernel's walls, or bare processes.

Role: owns the zygote and the slots. Neighbours: `config` builds one, the rollout factory creates through it.
Invariants: a zygote that died is replaced at the next `create`; leftovers of dead hosts are reaped at start.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollwright.clock import Clock
from rollwright.errors import SandboxLost, SandboxUnavailable
from rollwright.pool.base import Lease
from rollwright.sandbox import owners
from rollwright.sandbox.base import GuaranteeName, Limits, Snapshot
from rollwright.sandbox.confine import landlock_abi
from rollwright.sandbox.files import remove_tree
from rollwright.sandbox.folder import FolderPlace, Slot
from rollwright.sandbox.launch import ZygoteProcess, settings
from rollwright.sandbox.place import Place
from rollwright.sandbox.provider import REQUIRED, UNSAFE, LocalProvider


class FolderProvider(LocalProvider):
    """What they share: places are folders below the root."""

    def __init__(
        self,
        root: Path,
        *,
        limits: Limits | None = None,
        require: Sequence[GuaranteeName] = REQUIRED,
        max_live: int = 64,
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(root, limits=limits, require=require, max_live=max_live, lease=lease, clock=clock)
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._idle: list[Slot] = []

    async def _open(self) -> None:
        owners.reap(self._root)

    async def _place(
        self, limits: Limits, network: str, snapshot: Snapshot | None, parent: str | None, owner: str
    ) -> Place:
        slot = await self._slot(limits)
        place = FolderPlace(slot, self.backend, self._clock, left=self._take_back, parent=parent)
        try:
            place.owned(owner)
            await self._furnish(slot)
            if snapshot is not None:
                await place.restore(snapshot)
        except BaseException:  # boundary: nothing half-made stays
            await place.leave(clean=False)
            raise
        return place

    async def _slot(self, limits: Limits) -> Slot:
        """One to put a sandbox in."""
        zygote = await self._warm()
        for slot in self._idle:
            if slot.fits(zygote, limits):
                self._idle.remove(slot)
                return slot
        return Slot(self._root / uuid.uuid4().hex, zygote, limits)

    async def _furnish(self, slot: Slot) -> None:
        """Make it ready for workers; its folder is there and somebody's."""

    def _take_back(self, slot: Slot | None) -> None:
        if slot is not None:
            self._idle.append(slot)

    async def _warm(self) -> ZygoteProcess:
        async with self._starting:
            if self._closed:
                raise SandboxLost("the sandbox provider was closed")
            if self._zygote is None or self._zygote.dead:
                if self._zygote is not None:
                    await self._zygote.close()
                    self._discard_idle()
                self._zygote = self._new_zygote()
                await self._zygote.start()
            return self._zygote

    def _new_zygote(self) -> ZygoteProcess:
        def unwanted(said: dict[str, Any]) -> None:
            if "pid" in said and not zygote.dead:
                zygote.line.send("end", pid=said["pid"])  # nobody waits for that worker any more

        zygote = ZygoteProcess(
            "rollwright.sandbox.zygote",
            settings(confined=self.walls, own=False),
            log=self._root / "zygote.log",
            clock=self._clock,
            unwanted=unwanted,
        )
        return zygote

    def _discard_idle(self) -> None:
        """Delete the slots of a zygote that is gone, their processes with it."""
        while self._idle:
            self._idle.pop().discard()

    async def _shut(self) -> None:
        if self._zygote is not None:
            await self._zygote.close()
        self._discard_idle()
        remove_tree(self._root / "snapshots")


class LandlockProvider(FolderProvider):
    """Sandboxes behind Landlock, seccomp and rlimits; no root, no namespaces needed. Shares the host's
    kernel: not for code that attacks kernels."""

    backend = "landlock"

    def _refuse(self) -> None:
        if landlock_abi() == 0:
            raise SandboxUnavailable(no_landlock())


class ProcessProvider(FolderProvider):
    """The same workers without walls: **no isolation**, only limits and cleaning up. Refuses to start
    unless `unsafe`."""

    backend = "process"
    walls = False

    def __init__(
        self,
        root: Path,
        *,
        unsafe: bool = False,
        limits: Limits | None = None,
        max_live: int = 64,
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(root, limits=limits, require=(), max_live=max_live, lease=lease, clock=clock)
        self._unsafe = unsafe

    def _refuse(self) -> None:
        if not self._unsafe:
            raise SandboxUnavailable(no_isolation())


def no_landlock() -> str:
    """What to tell a person whose kernel has no Landlock."""
    return (
        "this kernel has no Landlock (Linux ≥ 5.13 with landlock in its list of security modules), so agent "
        f"code cannot be kept from your files and network. {UNSAFE} to run it all the same"
    )


def no_isolation() -> str:
    """What to tell a person who chose bare processes without saying so."""
    return (
        "the backend 'process' runs agent code without isolation: it can read your files and use "
        f"your network. {UNSAFE} if that is what you want"
    )
