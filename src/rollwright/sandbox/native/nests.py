"""Where sandboxes are cloned from: the zygote itself, or forks of it that each sit in a memory cgroup.

Role: gives each sandbox a nest and takes it back. Neighbours: `provider` asks, `zygote` is the inner side.
Invariants: one sandbox at a time in a nest with a cgroup; a nest is used again only where nothing of the last
sandbox is left in its group; nests go with their zygote.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Sequence

import msgspec

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Limits
from rollwright.sandbox.channel import Line
from rollwright.sandbox.launch import ZygoteProcess
from rollwright.sandbox.native.cgroups import Group, Groups

_IDLE = 64
"""Nests kept at most."""


class Nest:
    """One of them. `pid` is its number there; `group` is None where it is the zygote itself."""

    def __init__(
        self, zygote: ZygoteProcess, line: Line, pid: int, group: Group | None, limits: Limits
    ) -> None:
        self.zygote, self.line, self.pid, self.group, self.limits = zygote, line, pid, group, limits

    async def clone(self, network: str, lowers: Sequence[str], limits: Limits) -> tuple[Line, int]:
        """A sandbox that has set itself up: the line to its pid 1, and its number here.

        Raises:
            SandboxError: it could not.
            SandboxLost: the nest is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line, pid = Line(ours, "pid 1 of the sandbox"), 0
        try:
            with theirs:
                future = self.line.send(
                    "create",
                    (theirs.fileno(),),
                    limits=msgspec.to_builtins(limits),
                    network=network,
                    lowers=list(lowers),
                    counted=self.group is not None,
                )
            said = (await self.line.answer(future)).said
            if "pid" not in said:
                raise SandboxError(f"no sandbox could be cloned: {said.get('text')}")
            pid = said["pid"]
            await line.ready()
        except BaseException as error:  # boundary: whatever ends the wait, nothing half-made stays
            line.shut("the sandbox was not made")
            if pid and not self.line.dead:
                self.line.send("end", pid=pid)
            if pid and isinstance(error, SandboxLost) and not self.line.dead:
                raise SandboxError(
                    f"a sandbox could not set itself up; {self.zygote.log} says why"
                ) from error
            raise
        return line, pid

    async def end(self, pid: int) -> None:
        """Kill what was cloned, and all that runs in it."""
        with contextlib.suppress(SandboxLost):  # without the nest it ends with its line
            await self.line.ask("end", pid=pid)

    async def close(self) -> None:
        """It is needed no more."""
        if self.group is None:
            return
        self.line.shut("the nest was closed")
        with contextlib.suppress(SandboxLost):
            await self.zygote.line.ask("end", pid=self.pid)
        await self.group.remove()


class Nests:
    """Those of one provider; without `groups` every sandbox is cloned from the zygote itself."""

    def __init__(self, groups: Groups | None) -> None:
        self.groups = groups
        self._idle: list[Nest] = []

    async def take(self, zygote: ZygoteProcess, limits: Limits) -> Nest:
        """A nest for a sandbox with these limits. Raises `SandboxError` where none can be made."""
        if self.groups is None:
            return Nest(zygote, zygote.line, zygote.pid, None, limits)
        for nest in self._idle:
            if nest.zygote is zygote and nest.limits == limits and not nest.line.dead:
                self._idle.remove(nest)
                if nest.group is not None:
                    nest.group.killed()  # what was, is not the next one's
                return nest
        try:
            group = self.groups.new(uuid.uuid4().hex, limits.memory_bytes)  # its files are memory too
        except OSError as error:
            raise SandboxError(f"no memory cgroup could be made: {error}") from error
        return await self._made(zygote, limits, group)

    async def _made(self, zygote: ZygoteProcess, limits: Limits, group: Group) -> Nest:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line = Line(ours, "the sandbox's nest")
        try:
            with theirs:
                future = zygote.line.send("nest", (theirs.fileno(), group.descriptor))
            said = (await zygote.line.answer(future)).said
            if "pid" not in said:
                raise SandboxError(f"no nest could be forked: {said.get('text')}")
            nest = Nest(zygote, line, said["pid"], group, limits)
            await line.ready()
        except BaseException:  # boundary: nothing half-made stays
            line.shut("the nest was not made")
            await group.remove()
            raise
        return nest

    async def give_back(self, nest: Nest, clean: bool) -> None:
        """Its sandbox has ended; where it was not `clean`, files of it live on and count in the group."""
        if clean and nest.group is not None and not nest.line.dead and not nest.zygote.dead:
            self._idle.append(nest)
            if len(self._idle) > _IDLE:  # most likely of limits that nobody asks for any more
                await self._idle.pop(0).close()
        else:
            await nest.close()

    async def close(self) -> None:
        """End the idle ones."""
        while self._idle:
            await self._idle.pop().close()
        if self.groups is not None:
            self.groups.close()
