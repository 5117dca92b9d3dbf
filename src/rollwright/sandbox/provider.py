"""What providers of sandboxes on this machine share: room, requirements, the living.

Role: makes `LocalSandbox`es over the places of a backend. Neighbours: `local` and `native.provider` say how
a place is made. Invariants: never more than `capacity` at once; guarantees are what the probe at start
observed; a requirement that is not met refuses, it does not degrade; nothing half-made stays.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from rollwright.clock import Clock, SystemClock
from rollwright.errors import DeadlineExceeded, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.pool.base import Lease
from rollwright.sandbox import archive
from rollwright.sandbox.base import Guarantee, GuaranteeName, Guarantees, Limits, Sandbox, Snapshot, State
from rollwright.sandbox.instance import LocalSandbox
from rollwright.sandbox.place import Place
from rollwright.sandbox.probe import probe
from rollwright.types import Environment

REQUIRED: tuple[GuaranteeName, ...] = ("fs", "net", "kill")
UNSAFE = "Pass --unsafe-sandbox (configuration: sandbox.unsafe = true)"
_CREATE_SECONDS = 60.0

_UNPROBED = Guarantees(
    fs=Guarantee.ABSENT,
    net=Guarantee.ABSENT,
    pids=Guarantee.ABSENT,
    memory=Guarantee.ABSENT,
    disk=Guarantee.ABSENT,
    kill=Guarantee.ABSENT,
)


class LocalProvider(ABC):
    """`root` is a folder for the sandboxes' own; one provider works in it at a time."""

    backend: str
    walls = True
    """Whether any are meant to stand."""
    networks: tuple[str, ...] = ("none",)
    """Those that may be asked for."""

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
        self._root = root.absolute()
        self._limits = limits or Limits()
        self._require = tuple(require)
        self._lease = lease
        self._clock = clock or SystemClock()
        self.capacity = max_live
        self._room = asyncio.Semaphore(max_live)
        self._living: dict[str, LocalSandbox] = {}
        self._guarantees = _UNPROBED
        self._closed = False

    @property
    def guarantees(self) -> Guarantees:
        return self._guarantees

    @property
    def live(self) -> int:
        """Sandboxes that are not killed."""
        return len(self._living)

    @property
    def together(self) -> frozenset[GuaranteeName]:
        """What it means to limit for all of a sandbox together; whether it does is probed."""
        return frozenset()

    @abstractmethod
    def _refuse(self) -> None:
        """Raise `SandboxUnavailable` where this backend cannot work at all."""

    @abstractmethod
    async def _open(self) -> None:
        """Make ready; what a dead owner left is removed first."""

    @abstractmethod
    async def _place(
        self, limits: Limits, network: str, snapshot: Snapshot | None, parent: str | None, owner: str
    ) -> Place:
        """A fresh place that holds `snapshot`, written down as `owner`'s before it is there."""

    @abstractmethod
    async def _shut(self) -> None:
        """End what `_open` made; no sandbox lives."""

    async def start(self) -> None:
        self._refuse()
        self._root.mkdir(parents=True, exist_ok=True)
        try:
            await self._open()
            self._guarantees = await self._probed()
            self._demand(self._require)
        except BaseException:  # boundary: nothing stays of a provider that does not start
            await self.close()
            raise

    async def _probed(self) -> Guarantees:
        """What attempts to escape found."""
        return await probe(self, self._root, self._limits, confined=self.walls, together=self.together)

    def _demand(self, names: Sequence[str]) -> None:
        """Raise `SandboxUnavailable` where one of these is not enforced."""
        if missing := self._guarantees.missing(names):
            found = ", ".join(f"{name} is {getattr(self._guarantees, name).value}" for name in missing)
            raise SandboxUnavailable(
                f"the backend {self.backend} does not keep here what is required of a sandbox: {found}, "
                f"expected enforced. {UNSAFE} to run agent code all the same, or take the names out of "
                "sandbox.require"
            )

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
        self._demand(require)
        if network not in self.networks:
            raise SandboxError(
                f"no network {network!r} is granted; the backend {self.backend} grants "
                f"{', '.join(self.networks)}"
            )
        if snapshot is not None and environment is not None:
            raise ValueError("a sandbox begins with an environment or with a snapshot, not with both")
        await self._take_room()
        try:
            place = await self._place(limits or self._limits, network, snapshot, None, owner)
        except BaseException:  # boundary: the place taken is given back
            self._room.release()
            raise
        return await self._peopled(place, environment or Environment(), owner, network)

    async def _take_room(self) -> None:
        if self._lease is not None:
            self._lease.check()
        if self._closed:
            raise SandboxLost("the sandbox provider was closed")
        try:
            async with asyncio.timeout(_CREATE_SECONDS):
                await self._room.acquire()
        except TimeoutError as error:
            what = f"waiting for room among {self.live} live sandboxes"
            raise DeadlineExceeded(what, _CREATE_SECONDS) from error

    async def _peopled(
        self, place: Place, environment: Environment, owner: str, network: str
    ) -> LocalSandbox:
        """A sandbox on `place`, for which room was taken."""
        sandbox = LocalSandbox(
            place,
            self._guarantees_with(network),
            self._clock,
            network=network,
            fork=self._fork,
            adopt=self._adopt,
            on_end=self._forget,
        )
        self._living[sandbox.id] = sandbox
        try:
            await sandbox.adopt(environment, owner)
        except BaseException:  # boundary: nothing half-made stays
            await sandbox.kill()
            raise
        return sandbox

    def _guarantees_with(self, network: str) -> Guarantees:
        """What a sandbox in that network keeps."""
        return self._guarantees

    async def _fork(self, sandbox: LocalSandbox, snapshot: Snapshot) -> LocalSandbox:
        await self._take_room()
        owner = sandbox.info().owner
        try:
            place = await self._place(sandbox.limits, sandbox.network, snapshot, sandbox.id, owner)
        except BaseException:  # boundary: as above
            self._room.release()
            raise
        return await self._peopled(place, Environment(), owner, sandbox.network)

    async def _adopt(self, sandbox: LocalSandbox, place: Place) -> LocalSandbox:
        """A live fork of `sandbox`, on a place that is there."""
        try:
            await self._take_room()
        except BaseException:  # boundary: as above
            await place.leave(clean=False)
            raise
        return await self._peopled(place, Environment(), sandbox.info().owner, sandbox.network)

    def _forget(self, sandbox: LocalSandbox) -> None:
        del self._living[sandbox.id]
        self._room.release()

    async def connect(self, id: str) -> Sandbox:
        sandbox = self._living.get(id)
        if sandbox is None or sandbox.info().state is State.KILLED:
            raise SandboxLost(
                f"no sandbox {id} lives here; a sandbox on this machine is reached by the process that "
                "made it"
            )
        return sandbox

    async def load(self, path: Path) -> Snapshot:
        content = archive.load(path)
        sandbox = await self.create(owner=f"load of {path.name}")
        try:
            await sandbox.files.upload(content)
            return await sandbox.snapshot()
        finally:
            await sandbox.kill()

    async def close(self) -> None:
        self._closed = True
        failures = await asyncio.gather(
            *(each.kill() for each in tuple(self._living.values())), return_exceptions=True
        )
        await self._shut()
        for failure in failures:
            if isinstance(failure, Exception):
                raise SandboxError(f"a sandbox could not be ended: {failure}") from failure
