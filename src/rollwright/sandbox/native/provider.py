"""The backend native: sandboxes with namespaces, files, users and limits of their own.

Role: owns the zygotes, one for each network, and the memory cgroups. Neighbours: `config` builds it, the
rollout factory creates through it. Invariants: whose a sandbox is, is written down before it exists; a zygote
that died is replaced at the next `create`; nothing of a sandbox lies in the host's files.
"""

from __future__ import annotations

import asyncio
import functools
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollwright.clock import Clock
from rollwright.errors import SandboxLost, SandboxUnavailable
from rollwright.pool.base import Lease
from rollwright.sandbox import owners
from rollwright.sandbox.base import Guarantee, GuaranteeName, Guarantees, Limits, Sandbox, Snapshot
from rollwright.sandbox.launch import ZygoteProcess, readable, settings
from rollwright.sandbox.native.cgroups import groups
from rollwright.sandbox.native.ground import Layer, NativeSnapshot
from rollwright.sandbox.native.nests import Nests
from rollwright.sandbox.native.place import NativePlace, native
from rollwright.sandbox.native.template import WORK
from rollwright.sandbox.provider import REQUIRED, LocalProvider
from rollwright.sandbox.registry import Entry, Registry

_OWN = ("/tmp/", f"{WORK}/", "/proc/", "/dev/")
"""Folders that a sandbox has for itself."""
_ROOT = "root"
"""Folder that the template is mounted on, in the zygote's mount namespace only."""
_SINGLE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""An interpreter with more threads cannot be forked as it is."""


_KNOWN: dict[tuple[str, Limits, frozenset[GuaranteeName]], Guarantees] = {}
"""What probes of this process found: the kernel and its rules stay as they are, and a run has two
providers."""


class NativeProvider(LocalProvider):
    """See the module. `networks` beyond "none" and "loopback" are granted: "host" is the host's own. With
    `live` interpreters can be forked as they are; forks share what limits their first sandbox's memory and
    processes: the backend is named so."""

    def __init__(
        self,
        root: Path,
        *,
        limits: Limits | None = None,
        require: Sequence[GuaranteeName] = REQUIRED,
        networks: Sequence[str] = (),
        live: bool = False,
        max_live: int = 64,
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(root, limits=limits, require=require, max_live=max_live, lease=lease, clock=clock)
        self.backend = "native-live" if live else "native"
        self.networks = ("none", "loopback", *networks)
        self._live = live
        self._zygotes: dict[bool, ZygoteProcess] = {}  # by whether they are in the host's network
        self._starting = asyncio.Lock()
        self._nests = Nests(None)
        self._entry: Entry | None = None

    def _refuse(self) -> None:
        if not hasattr(os, "pidfd_open"):
            raise SandboxUnavailable(
                "the backend native needs Linux; choose sandbox.type=process or a remote one"
            )

        hidden = [path for path in readable() if path.startswith(_OWN)]
        if hidden:
            raise SandboxUnavailable(
                f"the Python that sandboxes run lies in {hidden[0]}, where they have a folder of their own: "
                "install Python elsewhere, or choose sandbox.type=landlock"
            )

    @property
    def together(self) -> frozenset[GuaranteeName]:
        kept: frozenset[GuaranteeName] = frozenset(("disk",) if self._live else ("pids", "disk"))
        return kept | {"memory"} if self._nests.groups is not None else kept

    async def _open(self) -> None:
        owners.reap_all()
        self._root.mkdir(parents=True, exist_ok=True)  # that may have been a dead owner's
        self._entry = entry = Registry(clock=self._clock).enter(backend=self.backend, root=self._root)
        (self._root / _ROOT).mkdir(exist_ok=True)
        name = f"rollwright-{entry.id}"
        found = groups(name, self._clock, made=entry.add_cgroup)
        self._nests = Nests(found)

    async def _probed(self) -> Guarantees:
        known = (self.backend, self._limits, self.together)
        if known not in _KNOWN:
            _KNOWN[known] = await super()._probed()
        return _KNOWN[known]

    async def _zygote(self, network: str) -> ZygoteProcess:
        exposed = network == "host"
        async with self._starting:
            if self._closed:
                raise SandboxLost("the sandbox provider was closed")
            zygote = self._zygotes.get(exposed)
            if zygote is None or zygote.dead:
                if zygote is not None:
                    await zygote.close()
                zygote = self._zygotes[exposed] = self._new_zygote(exposed)
                await zygote.start()
                if self._entry is not None:
                    self._entry.add_process(zygote.pid)
            return zygote

    def _new_zygote(self, exposed: bool) -> ZygoteProcess:
        def unwanted(said: dict[str, Any]) -> None:
            if "pid" in said and not zygote.dead:
                zygote.line.send("end", pid=said["pid"])  # nobody waits for that sandbox any more

        variables = _SINGLE if self._live else {}
        told = settings(variables, root=str(self._root / _ROOT), apart=not exposed, live=self._live)
        log = self._root / "zygote.log"
        zygote = ZygoteProcess(
            "rollwright.sandbox.native.zygote", told, log=log, clock=self._clock, unwanted=unwanted
        )
        return zygote

    async def _place(
        self, limits: Limits, network: str, snapshot: Snapshot | None, parent: str | None, owner: str
    ) -> NativePlace:
        id, entry = uuid.uuid4().hex, self._entry
        if entry is None:
            raise SandboxLost("the sandbox provider was not started")
        entry.sandbox(id, owner)
        zygote = await self._zygote(network)
        lowers: tuple[Layer, ...] = ()
        if snapshot is not None:
            lowers = native(snapshot).layers()
            for ground in native(snapshot).grounds():
                await ground.attach(zygote)
        nest = await self._nests.take(zygote, limits)
        try:
            line, pid = await nest.clone(network, [layer.name for layer in lowers], limits)
        except BaseException:  # boundary: nothing half-made stays
            await self._nests.give_back(nest, clean=False)
            raise
        return NativePlace(
            id,
            self.backend,
            limits,
            line,
            nest,
            pid,
            lowers=lowers,
            left=self._nests.give_back,
            snapshot=self._snapshot,
            entry=entry,
            parent=parent,
            branched=functools.partial(self._branch, network, owner) if self._live else None,
        )

    async def _branch(self, network: str, owner: str, place: NativePlace, snapshot: Snapshot) -> NativePlace:
        """A place for a live fork of what is in `place`."""
        return await self._place(place.limits, network, snapshot, place.id, owner)

    def _snapshot(self, layers: Sequence[Layer]) -> NativeSnapshot:
        return NativeSnapshot(layers, self._opened)

    async def _opened(self, snapshot: Snapshot) -> Sandbox:
        return await self.create(owner=f"look into {snapshot.id}", snapshot=snapshot)

    def _guarantees_with(self, network: str) -> Guarantees:
        if network != "host":
            return self._guarantees
        return msgspec.structs.replace(self._guarantees, net=Guarantee.ABSENT)

    async def _shut(self) -> None:
        await self._nests.close()
        for zygote in self._zygotes.values():
            await zygote.close()
        if (self._root / _ROOT).exists():
            (self._root / _ROOT).rmdir()
        if self._entry is not None:
            self._entry.leave()
