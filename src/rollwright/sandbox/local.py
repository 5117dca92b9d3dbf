"""Providers of sandboxes on this machine: behind the kernel's walls, or in bare processes.

Role: owns the zygote, the number of live sandboxes and their root folder. Neighbours: `config` builds one,
the rollout factory creates through it. Invariants: never more than `max_live` at once; guarantees are what
the probe at start observed; a requirement that is not met refuses to start, it does not degrade; a zygote
that died is replaced at the next `create`; leftovers of dead hosts are reaped at start.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path

from rollwright.clock import Clock, SystemClock
from rollwright.errors import DeadlineExceeded, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.pool.base import Lease
from rollwright.sandbox import owners
from rollwright.sandbox.base import Guarantee, Guarantees, Limits, Sandbox
from rollwright.sandbox.channel import ZygoteProcess
from rollwright.sandbox.confine import landlock_abi
from rollwright.sandbox.files import remove_tree
from rollwright.sandbox.instance import LocalSandbox, Slot
from rollwright.sandbox.probe import probe
from rollwright.types import Environment

REQUIRED = ("fs", "net", "kill")
_CREATE_SECONDS = 60.0
_UNSAFE = "Pass --unsafe-sandbox (configuration: sandbox.unsafe = true)"

_UNPROBED = Guarantees(
    fs=Guarantee.ABSENT,
    net=Guarantee.ABSENT,
    pids=Guarantee.ABSENT,
    memory=Guarantee.ABSENT,
    disk=Guarantee.ABSENT,
    kill=Guarantee.ABSENT,
)


class _LocalProvider:
    """What both providers share. `root` is a folder for the sandboxes' own; one provider works in it at a
    time."""

    _confined: bool

    def __init__(
        self,
        root: Path,
        *,
        limits: Limits | None = None,
        require: Sequence[str] = REQUIRED,
        max_live: int = 64,
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._root = root.absolute()
        self._limits = limits or Limits()
        self._require = tuple(require)
        self._lease = lease
        self._clock = clock or SystemClock()
        self.capacity = max_live
        self._room = asyncio.Semaphore(max_live)
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._live: set[LocalSandbox] = set()
        self._idle: list[Slot] = []
        self._guarantees = _UNPROBED
        self._closed = False

    @property
    def guarantees(self) -> Guarantees:
        return self._guarantees

    @property
    def live(self) -> int:
        """Sandboxes that are not closed."""
        return len(self._live)

    async def start(self) -> None:
        self._refuse()
        self._root.mkdir(parents=True, exist_ok=True)
        owners.reap(self._root)
        self._guarantees = await probe(self, self._root, self._limits, confined=self._confined)
        if missing := self._guarantees.missing(self._require):
            found = ", ".join(f"{name} is {getattr(self._guarantees, name).value}" for name in missing)
            await self.close()
            raise SandboxUnavailable(
                f"this machine does not keep what is required of a sandbox: {found}, expected enforced. "
                f"{_UNSAFE} to run agent code all the same, "
                "or take the names out of sandbox.require"
            )

    def _refuse(self) -> None:
        """Raise `SandboxUnavailable` where this backend cannot work at all."""
        raise NotImplementedError

    async def create(self, environment: Environment, *, owner: str, limits: Limits | None = None) -> Sandbox:
        """Waits while `max_live` are alive.

        Raises:
            DeadlineExceeded: no room within 60 s.
            LeaseRevoked: the pool wants the machine back.
            SandboxError: the environment's SQL failed.
        """
        if self._lease is not None:
            self._lease.check()
        try:
            async with asyncio.timeout(_CREATE_SECONDS):
                await self._room.acquire()
        except TimeoutError as error:
            what = f"waiting for room among {self.live} live sandboxes"
            raise DeadlineExceeded(what, _CREATE_SECONDS) from error
        try:
            zygote = await self._warm()
        except BaseException:  # boundary: the place taken is given back
            self._room.release()
            raise
        sandbox = LocalSandbox(
            self._slot(zygote, limits or self._limits),
            self._guarantees,
            self._clock,
            fork=self._copy,
            on_close=self._forget,
        )
        self._live.add(sandbox)
        try:
            await sandbox.build(environment, owner)
        except BaseException:  # boundary: nothing half-made stays
            await sandbox.close()
            raise
        return sandbox

    async def _warm(self) -> ZygoteProcess:
        async with self._starting:
            if self._closed:
                raise SandboxLost("the sandbox provider was closed")
            if self._zygote is None or self._zygote.dead:
                if self._zygote is not None:
                    await self._zygote.close()
                    self._discard_idle()
                log = self._root / "zygote.log"
                self._zygote = ZygoteProcess(confined=self._confined, log=log, clock=self._clock)
                await self._zygote.start()
            return self._zygote

    async def _copy(self, sandbox: LocalSandbox) -> Sandbox:
        environment = await sandbox.snapshot()
        return await self.create(environment, owner=f"fork of {sandbox.id}", limits=sandbox.limits)

    def _slot(self, zygote: ZygoteProcess, limits: Limits) -> Slot:
        for slot in self._idle:
            if slot.fits(zygote, limits):
                self._idle.remove(slot)
                return slot
        return Slot(self._root / uuid.uuid4().hex, zygote, limits)

    def _forget(self, sandbox: LocalSandbox, kept: Slot | None) -> None:
        self._live.remove(sandbox)
        self._room.release()
        if kept is not None:
            self._idle.append(kept)

    def _discard_idle(self) -> None:
        """Delete the slots of a zygote that is gone, their processes with it."""
        while self._idle:
            slot = self._idle.pop()
            if slot.database is not None:
                slot.database.close()
            remove_tree(slot.folder)

    async def close(self) -> None:
        self._closed = True
        failures = await asyncio.gather(*(s.close() for s in tuple(self._live)), return_exceptions=True)
        if self._zygote is not None:
            await self._zygote.close()
        self._discard_idle()
        for failure in failures:
            if isinstance(failure, Exception):
                raise SandboxError(f"a sandbox could not be closed: {failure}") from failure


class LandlockProvider(_LocalProvider):
    """Sandboxes behind Landlock, seccomp and rlimits; no root, no namespaces needed. Shares the host's
    kernel: not for code that attacks kernels."""

    _confined = True

    def _refuse(self) -> None:
        if landlock_abi() == 0:
            raise SandboxUnavailable(no_landlock())


class ProcessProvider(_LocalProvider):
    """The same workers without walls: **no isolation**, only limits and cleaning up. Refuses to start
    unless `unsafe`."""

    _confined = False

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
        f"code cannot be kept from your files and network. {_UNSAFE} to run it all the same"
    )


def no_isolation() -> str:
    """What to tell a person who chose bare processes without saying so."""
    return (
        "the backend 'process' runs agent code without isolation: it can read your files and use "
        f"your network. {_UNSAFE} if that is what you want"
    )
