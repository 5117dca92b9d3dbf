"""A sandbox's ground as a folder of the host, its workers forked from a zygote of the host's.

Role: the `Place` of the backends landlock, process, bubblewrap. Neighbours: `local` hands out slots, `files`
touches the folder, `zygote` forks. Invariants: whose it is lies outside the folder that the agent can write;
a folder is used again only where nothing but SQL has outlived its sandbox.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from rollwright.clock import Clock
from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox import archive, files, owners
from rollwright.sandbox.base import Files, Limits, Snapshot
from rollwright.sandbox.channel import Worker, pair
from rollwright.sandbox.launch import ZygoteProcess
from rollwright.sandbox.place import Kind, Place

_USES = 200
"""Sandboxes one database process serves, each after the other, before it is replaced: its CPU limit is for
all of them."""


@dataclass
class Slot:
    """A folder that sandboxes use one after another, with a database process that may outlive the sandbox.
    The process runs nothing of an agent's but SQL, and is only kept while every statement ended by itself."""

    folder: Path
    zygote: ZygoteProcess
    limits: Limits
    own: bool = False
    """The zygote is pid 1 of this sandbox alone and ends with it: what it numbers means nothing outside."""
    database: Worker | None = None
    uses: int = 0

    @property
    def work(self) -> Path:
        """The sandbox's own folder; the only one its workers can write to."""
        return self.folder / "work"

    def fits(self, zygote: ZygoteProcess, limits: Limits) -> bool:
        """Whether another sandbox may use it."""
        return (
            not self.own
            and self.zygote is zygote
            and not zygote.dead
            and self.limits == limits
            and self.uses < _USES
        )

    def discard(self) -> None:
        """Delete it; its processes are gone."""
        if self.database is not None:
            self.database.close()
        files.remove_tree(self.folder)


class FolderFiles:
    """See `sandbox.base.Files`. Below `work`."""

    def __init__(self, work: Path, limits: Limits) -> None:
        self._work, self._limits = work, limits
        self._bounds = archive.Bounds(limits.disk_bytes, limits.files, limits.file_bytes)

    async def read(self, path: str) -> bytes:
        return files.read_beneath(self._work, path, self._limits.file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        files.write_beneath(self._work, path, data, self._limits.file_bytes)

    async def list(self, path: str = "") -> list[str]:
        return files.list_beneath(self._work, path)

    async def remove(self, path: str) -> None:
        files.remove_beneath(self._work, path)

    async def upload(self, archive: bytes, path: str = "") -> None:
        files.unpack_beneath(self._work, archive, path, self._bounds)

    async def download(self, path: str = "") -> bytes:
        return files.pack_beneath(self._work, path, self._bounds)


class FolderSnapshot:
    """See `sandbox.base.Snapshot`. An archive in a file; links are not in it."""

    def __init__(self, path: Path) -> None:
        self.id, self._path = path.stem, path

    def content(self) -> bytes:
        """The archive. Raises `SandboxError` where it was dropped."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError as error:
            raise SandboxError(f"snapshot {self.id} was dropped") from error

    async def save(self, folder: Path) -> Path:
        return archive.save(self.content(), folder)

    async def drop(self) -> None:
        self._path.unlink(missing_ok=True)


class FolderPlace:
    """See `sandbox.place.Place`. `left` gets the slot back where another sandbox may use it, else None."""

    def __init__(
        self,
        slot: Slot,
        backend: str,
        clock: Clock,
        *,
        left: Callable[[Slot | None], None],
        parent: str | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.backend, self.limits, self.parent = backend, slot.limits, parent
        self.forked: Literal["filesystem", "live"] | None = "filesystem" if parent else None
        self.files: Files = FolderFiles(slot.work, slot.limits)
        self.work = str(slot.work)
        self.moves, self.guarded = False, not slot.own
        self._slot, self._zygote, self._clock, self._left = slot, slot.zygote, clock, left
        self._workers: list[Worker] = []
        self._made = False

    @property
    def lost(self) -> str:
        return f"its zygote is gone: {self._zygote.dead}" if self._zygote.dead else ""

    def owned(self, owner: str) -> None:
        slot = self._slot
        if not self._made:
            self._made = True
            slot.uses += 1
            slot.folder.mkdir(exist_ok=slot.uses > 1)
        owners.record(slot.folder, owner, self._clock.wall())
        slot.work.mkdir(mode=0o700, exist_ok=True)

    def fork(self, kind: Kind, reply_bytes: int) -> Worker:
        slot = self._slot
        if kind is Kind.DATABASE and slot.database is not None:
            return slot.database
        folder = slot.folder if kind is Kind.DATABASE else slot.work
        ours, theirs = pair()
        with theirs:
            limits = msgspec.to_builtins(self.limits)
            try:
                future = self._zygote.line.send(
                    "fork", (theirs.fileno(),), kind=kind.value, folder=str(folder), limits=limits
                )
            except SandboxLost:
                ours.close()
                raise
        worker = Worker(future, ours, reply_bytes)
        if kind is Kind.DATABASE:
            slot.database = worker
        self._workers.append(worker)
        future.add_done_callback(lambda _: self._note(worker))
        return worker

    def _note(self, worker: Worker) -> None:
        """Write down a worker that is there now."""
        if (pid := worker.pid()) and not self._slot.own:
            self._zygote.groups.add(pid)
            if self._slot.folder.exists():
                owners.record_worker(self._slot.folder, pid)

    async def end(self, worker: Worker) -> int:
        if worker is self._slot.database:
            self._slot.database = None
        if worker in self._workers:
            self._workers.remove(worker)
        pid = (await self._zygote.line.answer(worker.forked)).said["pid"]
        self._zygote.groups.discard(pid)
        return int((await self._zygote.line.ask("end", pid=pid)).said["status"])

    def out_of_memory(self) -> bool:
        return False

    async def snapshot(self) -> Snapshot:
        folder = self._slot.folder.parent / "snapshots"
        folder.mkdir(exist_ok=True)
        path = folder / f"{uuid.uuid4().hex}.tar"
        try:
            content = await self.files.download()
        except OSError as error:
            raise SandboxError(f"sandbox {self.id}: its files cannot be kept: {error}") from error
        path.write_bytes(content)
        return FolderSnapshot(path)

    async def restore(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, FolderSnapshot):
            raise SandboxError(f"snapshot {snapshot.id} is of another backend than {self.backend}")
        content = snapshot.content()
        files.empty_tree(self._slot.work)
        await self.files.upload(content)

    async def branch(self, interpreter: Worker, reply_bytes: int) -> tuple[Place, Worker]:
        raise SandboxError(
            f"the backend {self.backend} has no live fork: choose sandbox.type=native with live=true"
        )

    async def freeze(self, frozen: bool) -> None:
        await self._zygote.line.ask("freeze", pids=[worker.pid() for worker in self._workers], frozen=frozen)

    async def ping(self) -> None:
        if self.lost:
            raise SandboxLost(f"sandbox {self.id}: {self.lost}")

    async def leave(self, clean: bool) -> bool:
        slot, kept = self._slot, None
        keep = clean and slot.database is not None and slot.fits(self._zygote, self.limits)
        try:
            if slot.own:
                await self._zygote.close()
            for worker in tuple(self._workers):
                if not (keep and worker is slot.database):
                    with contextlib.suppress(SandboxLost):  # a dead zygote took its workers along
                        await self.end(worker)
                    worker.close()
            if slot.database is not None and not keep:
                slot.database.close()
            if slot.folder.exists():
                if keep:
                    files.empty_tree(slot.work)
                    kept = slot
                else:
                    slot.discard()
        finally:
            self._left(kept)
        return kept is not None
