"""The ground of a native sandbox, seen from the host: a line to its pid 1.

Role: the `Place` of the backend native. Neighbours: `provider` makes it, `inside` answers, `ground` keeps its
layers. Invariant: the host touches nothing of the sandbox itself: what it reads and writes goes through pid
1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Files, Limits, Snapshot
from rollwright.sandbox.channel import ANSWER_SECONDS, Answer, Line, Reply, Worker, WorkerGone, pair
from rollwright.sandbox.native import memory
from rollwright.sandbox.native.ground import Ground, Layer, NativeSnapshot
from rollwright.sandbox.native.nests import Nest
from rollwright.sandbox.native.template import WORK
from rollwright.sandbox.place import Kind, Place
from rollwright.sandbox.registry import Entry
from rollwright.types import CallStatus, Json


class NativeFiles:
    """See `sandbox.base.Files`."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def _ask(self, operation: str, path: str, data: bytes | None = None) -> bytes:
        """What came back. Raises the error that `inside` met."""
        if data is None:
            answer = await self._line.ask(operation, path=path)
        else:
            descriptor = memory.hold(data)
            try:
                answer = await self._line.ask(operation, (descriptor,), path=path, carried=True)
            finally:
                os.close(descriptor)
        try:
            if "errno" in answer.said:
                raise OSError(answer.said["errno"], answer.said["text"], path)
            return memory.held(answer.descriptors[0]) if answer.descriptors else b""
        finally:
            answer.close()

    async def read(self, path: str) -> bytes:
        return await self._ask("read", path)

    async def write(self, path: str, data: bytes) -> None:
        await self._ask("write", path, data)

    async def list(self, path: str = "") -> list[str]:
        found: list[str] = json.loads(await self._ask("list", path))
        return found

    async def remove(self, path: str) -> None:
        await self._ask("remove", path)

    async def upload(self, archive: bytes, path: str = "") -> None:
        await self._ask("upload", path, archive)

    async def download(self, path: str = "") -> bytes:
        return await self._ask("download", path)


class NativePlace:
    """See `sandbox.place.Place`."""

    work = WORK

    def __init__(
        self,
        id: str,
        backend: str,
        limits: Limits,
        line: Line,
        nest: Nest,
        pid: int,
        *,
        lowers: Sequence[Layer],
        left: Callable[[Nest, bool], Awaitable[None]],
        snapshot: Callable[[Sequence[Layer]], NativeSnapshot],
        entry: Entry,
        parent: str | None = None,
        branched: Callable[[NativePlace, Snapshot], Awaitable[NativePlace]] | None = None,
    ) -> None:
        self.id, self.backend, self.limits, self.parent = id, backend, limits, parent
        self.forked: Literal["filesystem", "live"] | None = "filesystem" if parent else None
        self.files: Files = NativeFiles(line)
        self.moves, self.guarded = False, False
        self._line, self._nest, self._pid = line, nest, pid
        self._left, self._snapshot, self._entry, self._branched = left, snapshot, entry, branched
        self._guest: Worker | None = None  # a live fork of an interpreter, which is a process of `_home`
        self._home: NativePlace = self
        self._grounds: list[Ground] = []
        self._own: Ground | None = None
        self._hold(lowers)

    def _hold(self, layers: Sequence[Layer]) -> None:
        """These are needed as long as the sandbox lives: a snapshot of it has them too."""
        for layer in layers:
            if layer.ground not in self._grounds:
                layer.ground.hold()
                self._grounds.append(layer.ground)

    @property
    def lost(self) -> str:
        if why := self._line.dead or self._nest.zygote.dead:
            return why
        if self._guest is not None and self._home.lost:
            return f"it is a live fork and ended with {self._home.id}: {self._home.lost}"
        return ""

    def owned(self, owner: str) -> None:
        self._entry.sandbox(self.id, owner)

    async def _ask(self, operation: str, descriptors: tuple[int, ...] = (), **arguments: Json) -> Answer:
        """One request to pid 1. Raises `SandboxError` where it could not be done."""
        answer = await self._line.ask(operation, descriptors, **arguments)
        if "errno" in answer.said:
            raise SandboxError(f"sandbox {self.id}: {operation} failed: {answer.said['text']}")
        return answer

    def fork(self, kind: Kind, reply_bytes: int) -> Worker:
        ours, theirs = pair()
        with theirs:
            try:
                future = self._line.send("fork", (theirs.fileno(),), kind=kind.value)
            except SandboxLost:
                ours.close()
                raise
        return Worker(future, ours, reply_bytes)

    async def end(self, worker: Worker) -> int:
        said = (await self._line.answer(worker.forked)).said
        if "pid" not in said:
            raise SandboxError(f"sandbox {self.id}: no worker could be forked: {said['text']}")
        home = self._home_of(worker)
        if worker is self._guest:
            self._guest = None
        return int((await home._ask("end", pid=said["pid"])).said["status"])

    def _home_of(self, worker: Worker) -> NativePlace:
        """Where its process is."""
        return self._home if worker is self._guest else self

    def out_of_memory(self) -> bool:
        if self._guest is not None and self._home.out_of_memory():
            return True
        return self._nest.group is not None and self._nest.group.killed()

    async def snapshot(self) -> Snapshot:
        answer = await self._ask("rotate", first=self._own is None)
        if self._own is None:
            self._own = Ground(self._nest.zygote, answer.descriptors[0])
            self._hold([Layer(self._own, "")])
        said = answer.said
        self.moves = said["moved"]
        named = {ground.name: ground for ground in self._grounds} | {"own": self._own}
        layers = []
        for name in said["layers"]:
            ground, _, folder = name.partition("/")
            layers.append(Layer(named[ground], folder))
        return self._snapshot(layers)

    async def restore(self, snapshot: Snapshot) -> None:
        layers = native(snapshot).layers()
        for ground in native(snapshot).grounds():
            if ground not in self._grounds:
                await ground.bring(self._line)
        self._hold(layers)
        names = [f"own/{layer.folder}" if layer.ground is self._own else layer.name for layer in layers]
        await self._ask("restore", lowers=names)

    async def branch(self, interpreter: Worker, reply_bytes: int) -> tuple[Place, Worker]:
        if self._branched is None:
            raise SandboxError("live forks need a mode of their own: sandbox.live = true")
        await self._told(interpreter, "let_go")
        try:
            snapshot = await self.snapshot()
            try:
                place = await self._branched(self, snapshot)
            finally:
                await snapshot.drop()
            try:
                return place, await place._settle(self._home_of(interpreter), interpreter, reply_bytes)
            except BaseException:  # boundary: nothing half-made stays
                await place.leave(clean=False)
                raise
        except SandboxError:
            await self._told(interpreter, "take")
            raise

    async def _settle(self, home: NativePlace, interpreter: Worker, reply_bytes: int) -> Worker:
        """Fork that interpreter of `home` into this place."""
        try:
            expected = await home._ask("expect")
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxLost):
                home._line.send("adopt", pid=0)
            raise
        ours, theirs = pair()
        pid, adopted = 0, False
        try:
            root = await self._ask("guest_root", tuple(expected.descriptors))
            try:
                pid = await self._forked(interpreter, (*root.descriptors, theirs.fileno()))
            finally:
                root.close()
        finally:
            expected.close()
            theirs.close()
            try:
                await home._ask("adopt", pid=pid)
                adopted = pid > 0
            finally:
                if not adopted:
                    ours.close()
        forked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        forked.set_result(Answer({"pid": pid}))
        guest = Worker(forked, ours, reply_bytes)
        self._guest, self._home, self.forked = guest, home, "live"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await guest.ready()  # it is a process group of its own now
        except BaseException as error:  # boundary: as above
            guest.close()
            if isinstance(error, WorkerGone | TimeoutError):
                raise SandboxError(f"the live fork of sandbox {self.parent} did not come up") from error
            raise
        return guest

    @staticmethod
    async def _told(interpreter: Worker, operation: str, descriptors: tuple[int, ...] = ()) -> Reply:
        """One request that is part of a fork. Raises `SandboxError` where it cannot be forked."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await interpreter.hand(operation, descriptors)
        except TimeoutError as error:
            raise WorkerGone(f"did not {operation} in time") from error
        if reply.status is not CallStatus.OK:
            raise SandboxError(f"the interpreter cannot be forked live now: {reply.stderr}")
        return reply

    async def _forked(self, interpreter: Worker, descriptors: tuple[int, ...]) -> int:
        """The number that it says its fork has."""
        reply = await self._told(interpreter, "branch", descriptors)
        if reply.value is None or not reply.value.isdecimal() or len(reply.value) > 9:
            raise WorkerGone("it said something else than the number of its fork")
        return int(reply.value)

    async def freeze(self, frozen: bool) -> None:
        await self._ask("freeze", frozen=frozen)
        if self._guest is not None:
            await self._home._ask("freeze", frozen=frozen, pid=self._guest.pid())

    async def ping(self) -> None:
        await self._ask("ping")

    async def leave(self, clean: bool) -> bool:
        try:
            guest, self._guest = self._guest, None
            if guest is not None:
                with contextlib.suppress(SandboxLost):  # then it is gone
                    await self._home._ask("end", pid=guest.pid())
            self._line.shut("the sandbox was killed")
            await self._nest.end(self._pid)
            await self._left(self._nest, self._own is None)
            self._entry.gone(self.id)
        finally:
            for ground in self._grounds:
                ground.release()
            self._grounds.clear()
        return False


def native(snapshot: Snapshot) -> NativeSnapshot:
    """That snapshot, if it is one of this backend; else raises `SandboxError`."""
    if not isinstance(snapshot, NativeSnapshot):
        raise SandboxError(f"snapshot {snapshot.id} is of another backend than native")
    return snapshot
