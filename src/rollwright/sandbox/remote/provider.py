"""Sandboxes on a vendor's machines.

Role: implements `SandboxProvider` over a `Vendor`. Neighbours: `config` builds it, `instance` is what it
makes, `owner` labels, `probe` finds the guarantees. Invariants: every machine carries its owner's labels
from its creation; the vendor itself ends each one that this process no longer renews; a machine whose
creation failed half-way is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path

from rollwright.clock import Clock, SystemClock
from rollwright.errors import (
    DeadlineExceeded,
    RollwrightError,
    SandboxError,
    SandboxLost,
    SandboxUnavailable,
)
from rollwright.pool.base import Lease
from rollwright.sandbox import archive
from rollwright.sandbox.base import (
    Guarantee,
    GuaranteeName,
    Guarantees,
    Limits,
    Sandbox,
    Snapshot,
    State,
)
from rollwright.sandbox.remote import owner as owners
from rollwright.sandbox.remote.adapter import Forkable, Machine, Vendor
from rollwright.sandbox.remote.instance import Kinship, Maker, RemoteSandbox
from rollwright.sandbox.remote.line import Line
from rollwright.sandbox.remote.patience import asked
from rollwright.sandbox.remote.probe import probe
from rollwright.sandbox.remote.snapshot import RemoteSnapshot
from rollwright.types import Environment

_CREATE_SECONDS = 60.0
"""How long `create` waits for room."""
_MACHINE_SECONDS = 180.0
"""How long the vendor may take to make one."""
_ABSENT = Guarantee.ABSENT
_NOTHING = Guarantees(
    fs=_ABSENT, net=_ABSENT, pids=_ABSENT, memory=_ABSENT, disk=_ABSENT, kill=_ABSENT, kernel_surface=_ABSENT
)


class RemoteProvider:
    """See `SandboxProvider`."""

    def __init__(
        self,
        vendor: Vendor,
        *,
        limits: Limits | None = None,
        require: Sequence[GuaranteeName] = (),
        max_live: int = 64,
        lease_seconds: float = 900.0,
        python: str = "python3",
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._vendor, self._limits, self._require = vendor, limits or Limits(), require
        self._lease_seconds, self._python, self._lease = lease_seconds, python, lease
        self._clock = clock or SystemClock()
        self._guarantees = _NOTHING
        self._capacity = max_live
        self._room = asyncio.Semaphore(max_live)
        self._live: dict[str, RemoteSandbox] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._closed = False
        self._maker = Maker(self._branch, self._adopt, self._forget, lease_seconds)

    async def start(self) -> None:
        if self._renewing is not None:
            return
        await self._vendor.open()
        await self.reap()
        sandbox = await self._make(Kinship(owner="probe"), self._limits)
        try:
            found, reached = await probe(
                sandbox, self._limits, self._vendor.targets, denies_network=self._vendor.denies_network
            )
            await sandbox.kill()
            gone = not await asked(
                self._clock,
                f"asking whether {sandbox.id} is gone",
                lambda timeout: sandbox.machine.alive(timeout=timeout),
            )
        finally:
            await sandbox.kill()
        kill = Guarantee.BEST_EFFORT if gone else _ABSENT  # the vendor's word for it
        self._guarantees = Guarantees(
            fs=found.fs,
            net=found.net,
            pids=found.pids,
            memory=found.memory,
            disk=found.disk,
            kill=kill,
            kernel_surface=found.kernel_surface,
        )
        self._demand(self._require, f"; reached: {', '.join(reached)}" if reached else "")
        self._renewing = asyncio.create_task(self._renew())

    def _demand(self, require: Sequence[str], seen: str = "") -> None:
        if missing := self._guarantees.missing(require):
            raise SandboxUnavailable(
                f"{self._vendor.name} does not give {', '.join(missing)} as tried from inside{seen}. Its "
                f"isolation ({self._vendor.isolation}) cannot be tried from there: leave them out of "
                "`require` if its word is enough, or take a local backend"
            )

    @property
    def guarantees(self) -> Guarantees:
        return self._guarantees

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def live(self) -> int:
        return len(self._live)

    async def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: Snapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> Sandbox:
        if environment is not None and snapshot is not None:
            raise SandboxError("a sandbox begins with an environment or a snapshot, not with both")
        if network != "none" and network not in self._vendor.networks:
            granted = ", ".join(self._vendor.networks) or "none are"
            raise SandboxError(f"the network '{network}' is not granted; granted: {granted}")
        self._demand(require)
        sandbox = await self._make(Kinship(owner=owner, network=network), limits or self._limits)
        try:
            if snapshot is not None:
                await sandbox.restore(snapshot)
            elif environment is not None:
                await sandbox.adopt(environment, owner)
        except BaseException:  # boundary: nothing half-made stays
            await _killed(sandbox)
            raise
        return sandbox

    async def _make(self, kinship: Kinship, limits: Limits) -> RemoteSandbox:
        if self._lease is not None:
            self._lease.check()
        await self._take_room()
        try:
            if self._closed:
                raise SandboxLost("the sandbox provider was closed")
            labels, key = owners.labels(kinship.owner), uuid.uuid4().hex
            machine = await asked(
                self._clock,
                f"making a sandbox with {self._vendor.name}",
                lambda timeout: self._vendor.create(
                    labels, kinship.network, self._lifetime(limits), key, timeout=timeout
                ),
                _MACHINE_SECONDS,
            )
        except BaseException:  # boundary: the place taken is given back
            self._room.release()
            raise
        return await self._ready(machine, kinship, limits, fresh=True)

    async def _ready(
        self, machine: Machine, kinship: Kinship, limits: Limits, *, fresh: bool
    ) -> RemoteSandbox:
        """The sandbox on a machine that has a place."""
        line = Line(machine, limits, self._clock, self._python)
        sandbox = RemoteSandbox(
            machine, line, self._vendor.name, kinship, self._guarantees, limits, self._clock, self._maker
        )
        self._live[machine.id] = sandbox
        try:
            if fresh:
                await line.start()
            if limits.wall_seconds is not None:
                await sandbox.set_timeout(limits.wall_seconds)
        except BaseException:  # boundary: nothing half-made stays
            await _killed(sandbox)
            raise
        return sandbox

    def _lifetime(self, limits: Limits) -> float:
        return self._lease_seconds if limits.wall_seconds is None else limits.wall_seconds + 60.0

    async def _take_room(self) -> None:
        try:
            async with asyncio.timeout(_CREATE_SECONDS):
                await self._room.acquire()
        except TimeoutError as error:
            what = f"waiting for room among {self.live} live sandboxes"
            raise DeadlineExceeded(what, _CREATE_SECONDS) from error

    async def _branch(self, parent: RemoteSandbox, snapshot: RemoteSnapshot) -> Sandbox:
        kinship = Kinship(
            owner=parent.kinship.owner, network=parent.kinship.network, parent=parent.id, forked="filesystem"
        )
        sandbox = await self._make(kinship, parent.limits)
        try:
            await sandbox.restore(snapshot)
        except BaseException:  # boundary: nothing half-made stays
            await _killed(sandbox)
            raise
        return sandbox

    async def _adopt(self, parent: RemoteSandbox, count: int) -> list[Sandbox]:
        """Copies that the vendor makes, with memory."""
        assert isinstance(parent.machine, Forkable)
        machine, taken = parent.machine, 0
        try:
            for _ in range(count):
                await self._take_room()
                taken += 1
            copies = await asked(
                self._clock,
                f"forking {parent.id}",
                lambda timeout: machine.fork(count, self._lifetime(parent.limits), timeout=timeout),
                _MACHINE_SECONDS,
            )
        except BaseException:  # boundary: the places taken are given back
            for _ in range(taken):
                self._room.release()
            raise
        kinship = Kinship(
            owner=parent.kinship.owner, network=parent.kinship.network, parent=parent.id, forked="live"
        )
        return [await self._ready(each, kinship, parent.limits, fresh=False) for each in copies]

    def _forget(self, sandbox: RemoteSandbox) -> None:
        if self._live.pop(sandbox.id, None) is not None:
            self._room.release()

    async def connect(self, id: str) -> Sandbox:
        found = self._live.get(id)
        if found is None or found.info().state is State.KILLED:
            raise SandboxLost(f"no live sandbox {id} of this provider")
        return found

    async def load(self, path: Path) -> Snapshot:
        return RemoteSnapshot(await asyncio.to_thread(archive.load, path))

    async def reap(self) -> int:
        """Kill the machines that dead processes of this host left at the vendor's; how many that were."""
        found = await asked(
            self._clock,
            f"listing the sandboxes at {self._vendor.name}",
            lambda timeout: self._vendor.owned(owners.ours(), timeout=timeout),
        )
        left = [each.id for each in found if owners.abandoned(each.labels)]
        count = 0
        for each in left:
            with contextlib.suppress(SandboxLost):  # another reaper was faster
                await self._kill(each)
                count += 1
        return count

    async def _kill(self, id: str) -> None:
        await asked(self._clock, f"killing {id}", lambda timeout: self._vendor.kill(id, timeout=timeout))

    async def _renew(self) -> None:
        """Let the vendor know that this process lives."""
        while True:
            await self._clock.sleep(self._lease_seconds / 3)
            for sandbox in [each for each in self._live.values() if each.leased]:
                with contextlib.suppress(RollwrightError):  # two more tries are left; its next call finds out
                    await sandbox.renew(self._lease_seconds)

    async def close(self) -> None:
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
            self._renewing = None
        failures = await asyncio.gather(
            *(each.kill() for each in tuple(self._live.values())), return_exceptions=True
        )
        await self._vendor.close()
        for failure in failures:
            if isinstance(failure, Exception):
                raise SandboxError(
                    f"a sandbox could not be killed: {failure}; {self._vendor.name} ends it "
                    f"within {self._lease_seconds:g} s"
                ) from failure


async def _killed(sandbox: RemoteSandbox) -> None:
    with contextlib.suppress(RollwrightError):  # what failed before is raised; the vendor ends the machine
        await sandbox.kill()
