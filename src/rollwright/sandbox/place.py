"""Where one sandbox's files are and its processes run: what differs between local backends.

Role: the seam between a sandbox's calls and the ground it stands on. Neighbours: `instance` calls it,
`folder` and `native.place` implement it. Invariants: a worker is forked behind all walls of its backend;
after `leave` nothing of the sandbox is left.
"""

from __future__ import annotations

import enum
from typing import Literal, Protocol

from rollwright.sandbox.base import Files, Limits, Snapshot
from rollwright.sandbox.channel import Worker


class Kind(enum.Enum):
    """What a worker does; each kind is a process of its own."""

    DATABASE = "database"
    INTERPRETER = "interpreter"
    PROGRAMS = "programs"


class Place(Protocol):
    """The ground of one sandbox. Calls come one after another, but for `leave` and `freeze`."""

    id: str
    """The sandbox's."""
    backend: str
    limits: Limits
    files: Files
    work: str
    """The working folder, as the sandbox's processes name it."""
    parent: str | None
    forked: Literal["filesystem", "live"] | None

    guarded: bool
    """Whether what agents start cannot signal the process of the database."""

    @property
    def lost(self) -> str:
        """Why it is gone; empty while it stands."""

    def owned(self, owner: str) -> None:
        """Write down whose it is, before anything is in it."""

    def fork(self, kind: Kind, reply_bytes: int) -> Worker:
        """A worker, on its way. Raises `SandboxLost` where the place is gone."""

    async def end(self, worker: Worker) -> int:
        """Kill a worker and its descendants: its exit code, negative for the signal that ended it (-9 may be
        ours); 0 where it was ended before."""

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed something here for memory since this was asked last."""

    async def snapshot(self) -> Snapshot:
        """The files as they are; no worker has one open for writing that it could do without. Afterwards the
        working folder may be another, see `moves`."""

    @property
    def moves(self) -> bool:
        """Whether a snapshot puts another working folder in the place of the last."""

    async def restore(self, snapshot: Snapshot) -> None:
        """Put the files back; no worker runs."""

    async def branch(self, interpreter: Worker, reply_bytes: int) -> tuple[Place, Worker]:
        """A place with a copy of the files, and of the interpreter as it is. Raises `SandboxError` where this
        backend has no live fork or the interpreter cannot be copied, `WorkerGone` where it ends over it."""

    async def freeze(self, frozen: bool) -> None:
        """Stop every process, or let all go on."""

    async def ping(self) -> None:
        """Raises `SandboxLost` where it does not stand."""

    async def leave(self, clean: bool) -> bool:
        """End every process, also under a call, which then finds its worker gone, and remove everything;
        where the sandbox was `clean`, its database's process, which never ran agent code, may stay for the
        next: then True."""
