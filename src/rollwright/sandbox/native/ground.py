"""Sealed layers as the host knows them, and the snapshots made of them.

Role: keeps a sandbox's files alive after it, as long as a snapshot or a fork needs them. Neighbours: `place`
takes snapshots, `provider` starts sandboxes from them, `layers` is the inner side. Invariants: nothing of a
ground lies in the host's files: it is a mount that the zygote holds, gone with the last who needs it, or with
the zygote; a snapshot's layers never change.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.sandbox import archive
from rollwright.sandbox.base import Sandbox, Snapshot
from rollwright.sandbox.channel import Answer, Line
from rollwright.sandbox.launch import ZygoteProcess
from rollwright.types import Json


class Ground:
    """The files of one sandbox, its layers in them. `descriptor` is a copy of their mount, not yet
    attached."""

    def __init__(self, zygote: ZygoteProcess, descriptor: int) -> None:
        self.name, self._zygote = uuid.uuid4().hex[:12], zygote
        self._descriptor = descriptor
        self._attached: list[ZygoteProcess] = []
        self._users = 0

    @property
    def lost(self) -> str:
        """Why it is gone; empty while it is there."""
        return self._zygote.dead

    def hold(self) -> None:
        """One more needs it."""
        self._users += 1

    def release(self) -> None:
        """One less."""
        self._users -= 1
        if self._users:
            return
        os.close(self._descriptor)
        for zygote in self._attached:
            if not zygote.dead:
                zygote.line.send("detach", name=self.name)

    async def attach(self, zygote: ZygoteProcess) -> None:
        """Have it where new sandboxes of `zygote` find it."""
        if zygote in self._attached:
            return
        if zygote is self._zygote:
            await _done(zygote.line, "attach", (self._descriptor,), name=self.name)
        else:
            await self.bring(zygote.line)
        self._attached.append(zygote)

    async def bring(self, line: Line) -> None:
        """Have it where whoever is at the end of that line looks for layers."""
        await self.attach(self._zygote)
        copy = await _done(self._zygote.line, "tree", name=self.name)
        try:
            await _done(line, "attach", tuple(copy.descriptors), name=self.name)
        finally:
            copy.close()


async def _done(line: Line, operation: str, descriptors: tuple[int, ...] = (), **arguments: Json) -> Answer:
    answer = await line.ask(operation, descriptors, **arguments)
    if "text" in answer.said:
        raise SandboxError(f"the files of a snapshot cannot be shared: {operation}: {answer.said['text']}")
    return answer


@dataclass(frozen=True)
class Layer:
    """A sealed folder in a ground."""

    ground: Ground
    folder: str

    @property
    def name(self) -> str:
        """Its path where layers are attached."""
        return f"{self.ground.name}/{self.folder}"


class NativeSnapshot:
    """See `sandbox.base.Snapshot`. `start` makes a sandbox from it."""

    def __init__(self, layers: Sequence[Layer], start: Callable[[Snapshot], Awaitable[Sandbox]]) -> None:
        self.id = uuid.uuid4().hex
        self._layers, self._start, self._dropped = tuple(layers), start, False
        for ground in self.grounds():
            ground.hold()

    def grounds(self) -> list[Ground]:
        """What its layers lie in."""
        return list({layer.ground.name: layer.ground for layer in self._layers}.values())

    def layers(self) -> tuple[Layer, ...]:
        """The newest first. Raises `SandboxError` where it was dropped, or its zygote died."""
        lost = "it was dropped" if self._dropped else next((g.lost for g in self.grounds() if g.lost), "")
        if lost:
            raise SandboxError(f"snapshot {self.id} is gone: {lost}")
        return self._layers

    async def save(self, folder: Path) -> Path:
        self.layers()
        sandbox = await self._start(self)
        try:
            content = await sandbox.files.download()
        except OSError as error:
            raise SandboxError(f"snapshot {self.id} cannot be archived: {error}") from error
        else:
            return archive.save(content, folder)
        finally:
            await sandbox.kill()

    async def drop(self) -> None:
        if not self._dropped:
            self._dropped = True
            for ground in self.grounds():
                ground.release()
