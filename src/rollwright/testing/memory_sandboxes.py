"""Sandboxes in this process, without any isolation, for tests of what stands around a sandbox.

Role: a fast fake of the sandbox seam. Neighbours: tests of agents, rewards, the factory and the sync face.
Invariants: it answers like a real one (SQLite really runs, variables persist, errors are results, snapshots
are immutable), and `live` tells what was not killed. Files are a dictionary: code that it runs sees the
machine's own. Never give it code that is not the test's own.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import io
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.clock import Clock, SystemClock
from rollwright.errors import SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import (
    Guarantee,
    GuaranteeName,
    Guarantees,
    Info,
    Limits,
    Sandbox,
    Snapshot,
    State,
)
from rollwright.types import CallStatus, Environment, ExecResult, Json, RowSet

NONE_KEPT = Guarantees(
    fs=Guarantee.ABSENT,
    net=Guarantee.ABSENT,
    pids=Guarantee.ABSENT,
    memory=Guarantee.ABSENT,
    disk=Guarantee.ABSENT,
    kill=Guarantee.ABSENT,
)
DATABASE = "data.db"
"""Where the database lies in a saved snapshot."""


def _names(path: str) -> list[str]:
    from rollwright.sandbox.archive import parts

    try:
        return parts(path)
    except PermissionError as error:
        raise PermissionError(
            errno.EPERM, "expected a relative path below the working folder", path
        ) from error


def _unpacked(archive: bytes, limits: Limits) -> dict[str, bytes]:
    """Files of an archive."""
    from rollwright.sandbox.archive import Bounds, unpack

    members = unpack(archive, Bounds(limits.disk_bytes, limits.files, limits.file_bytes))
    return {member.path: member.data for member in members if member.data is not None}


@dataclass
class MemorySnapshot:
    """Files and database of one moment; nothing changes them."""

    id: str
    contents: dict[str, bytes]
    database: bytes
    """As SQLite serializes it; empty where nothing was made."""

    async def save(self, folder: Path) -> Path:
        """See `Snapshot`."""
        from rollwright.sandbox import archive

        database = {DATABASE: self.database} if self.database else {}
        return archive.save(archive.pack({**self.contents, **database}.items()), folder)

    async def drop(self) -> None:
        """See `Snapshot`."""


class MemoryFiles:
    """Files of one sandbox: path → contents; folders are where files are."""

    def __init__(self, sandbox: MemorySandbox) -> None:
        self._sandbox = sandbox
        self.contents: dict[str, bytes] = {}

    def _path(self, path: str) -> str:
        self._sandbox.check()
        plain = "/".join(_names(path))
        if not plain or self._below(plain):
            raise PermissionError(errno.EPERM, "not a regular file", path)
        return plain

    def _below(self, folder: str) -> list[str]:
        return sorted(path for path in self.contents if not folder or path.startswith(f"{folder}/"))

    async def read(self, path: str) -> bytes:
        """See `Files`."""
        plain = self._path(path)
        if plain not in self.contents:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self.contents[plain]

    async def write(self, path: str, data: bytes) -> None:
        """See `Files`."""
        self.put(path, data)

    def put(self, path: str, data: bytes) -> None:
        """Replace a file within the limits."""
        plain, limits = self._path(path), self._sandbox.limits
        above = plain.split("/")[:-1]
        if any("/".join(above[:depth]) in self.contents for depth in range(1, len(above) + 1)):
            raise PermissionError(errno.EPERM, "a file, where a folder was expected", path)
        after = {**self.contents, plain: data}
        if len(data) > limits.file_bytes or len(after) > limits.files:
            raise OSError(errno.EFBIG, "a limit is reached", path)
        if sum(map(len, after.values())) > limits.disk_bytes:
            raise OSError(errno.ENOSPC, "no room", path)
        self.contents = after

    async def list(self, path: str = "") -> list[str]:
        """See `Files`."""
        self._sandbox.check()
        plain = "/".join(_names(path))
        if plain in self.contents:
            raise PermissionError(errno.EPERM, "a file, where a folder was expected", path)
        if plain and not self._below(plain):
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        return self._below(plain)

    async def remove(self, path: str) -> None:
        """See `Files`."""
        self._sandbox.check()
        plain = "/".join(_names(path))
        if not plain:
            raise PermissionError(errno.EPERM, "the working folder itself", path)
        gone = {plain, *self._below(plain)} & self.contents.keys()
        if not gone:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", path)
        self.contents = {name: data for name, data in self.contents.items() if name not in gone}

    async def upload(self, archive: bytes, path: str = "") -> None:
        """See `Files`."""
        self._sandbox.check()
        for name, data in _unpacked(archive, self._sandbox.limits).items():
            self.put("/".join([*_names(path), name]), data)

    async def download(self, path: str = "") -> bytes:
        """See `Files`."""
        from rollwright.sandbox.archive import pack

        top = len("".join(f"{name}/" for name in _names(path)))
        return pack([(name[top:], self.contents[name]) for name in await self.list(path)])


class MemorySandbox:
    """One environment; `lost` makes every further call raise `SandboxLost`."""

    def __init__(self, provider: MemorySandboxes, id: str, owner: str, limits: Limits) -> None:
        self.id = id
        self.limits = limits
        self.lost = False
        self.parent: str | None = None
        self._provider = provider
        self._owner = owner
        self._state = State.RUNNING
        self._going = asyncio.Event()
        self._going.set()
        self._timer: asyncio.Task[None] | None = None
        self._files = MemoryFiles(self)
        self._variables: dict[str, Any] = {}
        self._database = sqlite3.connect(":memory:", isolation_level=None)

    def begin(self, environment: Environment) -> None:
        """Put in what a task's sandbox holds at the start."""
        for file in environment.files:
            self._files.put(file.path, file.text.encode())
        try:
            self._database.executescript(environment.sql)
        except sqlite3.Error as error:
            raise SandboxError(f"the environment's SQL failed: {error}") from error

    @property
    def files(self) -> MemoryFiles:
        return self._files

    @property
    def guarantees(self) -> Guarantees:
        return NONE_KEPT

    def info(self) -> Info:
        return Info(
            id=self.id,
            backend="memory",
            owner=self._owner,
            state=self._state,
            guarantees=NONE_KEPT,
            limits=self.limits,
            parent=self.parent,
            forked=None if self.parent is None else "filesystem",
        )

    def check(self) -> None:
        """Raise `SandboxLost` where it is gone."""
        if self.lost or self._state is State.KILLED:
            raise SandboxLost(f"sandbox {self.id} is lost")

    async def _resumed(self, timeout: float) -> ExecResult | None:
        """Wait while it is paused; the result where that lasts too long."""
        self.check()
        if not self._going.is_set():
            going = asyncio.ensure_future(self._going.wait())
            timer = asyncio.ensure_future(self._provider.clock.sleep(timeout))
            try:
                await asyncio.wait({going, timer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                going.cancel()
                timer.cancel()
            self.check()
        return None if self._going.is_set() else ExecResult(status=CallStatus.TIMEOUT)

    async def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        late = await self._resumed(timeout)
        return late or ExecResult(status=CallStatus.ERROR, stderr="no programs here", exit_code=127)

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        if late := await self._resumed(timeout):
            return late
        out, value = io.StringIO(), None
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(out):
                exec(compile(tree, "<call>", "exec"), self._variables)
                if isinstance(last, ast.Expr):
                    body = compile(ast.Expression(last.value), "<call>", "eval")
                    value = eval(body, self._variables)
        except Exception as error:  # boundary: the code's own failure is its result
            text = f"{type(error).__name__}: {error}"
            return ExecResult(status=CallStatus.ERROR, stdout=out.getvalue(), stderr=text)
        shown = None if value is None else repr(value)
        return ExecResult(status=CallStatus.OK, stdout=out.getvalue(), value=shown)

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        if late := await self._resumed(timeout):
            return late
        try:
            cursor = self._database.execute(query, tuple(parameters))
            rows = [tuple(row) for row in cursor.fetchall()]
        except (sqlite3.Error, sqlite3.Warning) as error:
            return ExecResult(status=CallStatus.ERROR, stderr=str(error))
        if cursor.description is None:
            return ExecResult(status=CallStatus.OK)
        columns = tuple(str(column[0]) for column in cursor.description)
        return ExecResult(status=CallStatus.OK, rows=RowSet(columns=columns, rows=tuple(rows)))

    async def snapshot(self) -> MemorySnapshot:
        self.check()
        empty = self._database.execute("PRAGMA page_count").fetchone() == (0,)
        database = b"" if empty else self._database.serialize()
        return MemorySnapshot(self._provider.name(f"{self.id}@"), dict(self._files.contents), database)

    async def restore(self, snapshot: Snapshot) -> None:
        self.check()
        if not isinstance(snapshot, MemorySnapshot):
            raise SandboxError(f"snapshot {snapshot.id} is not one of these sandboxes")
        self._variables = {}
        self._files.contents = dict(snapshot.contents)
        self._database.close()
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        if snapshot.database:
            self._database.deserialize(snapshot.database)

    async def fork(self, count: int = 1, *, live: bool = False) -> list[Sandbox]:
        if live:
            raise SandboxError("sandboxes in memory have no live fork")
        snapshot, made = await self.snapshot(), list[Sandbox]()
        for _ in range(count):
            sandbox = await self._provider.create(owner=self._owner, limits=self.limits, snapshot=snapshot)
            sandbox.parent = self.id
            made.append(sandbox)
        return made

    async def pause(self) -> None:
        self.check()
        self._state = State.PAUSED
        self._going.clear()

    async def resume(self) -> None:
        self.check()
        self._state = State.RUNNING
        self._going.set()

    async def set_timeout(self, seconds: float | None) -> None:
        self.check()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.create_task(self._expire(seconds))

    async def _expire(self, seconds: float) -> None:
        await self._provider.clock.sleep(seconds)
        self._timer = None  # else `kill` cancels this task
        await self.kill()

    async def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._state = State.KILLED
        self._going.set()  # who waits learns it
        self._database.close()
        self._provider.forget(self)


class MemorySandboxes:
    """Makes them. `fault` may raise for an owner, in place of making its sandbox."""

    def __init__(self, fault: Callable[[str], None] | None = None, clock: Clock | None = None) -> None:
        self._fault = fault
        self.clock = clock or SystemClock()
        self.owners: list[str] = []
        """Every owner that asked, in order; a fork asks too."""
        self.open: dict[str, MemorySandbox] = {}
        """Id → sandbox, while it is not killed. The id is the owner's name where that is free."""
        self._made = 0

    async def start(self) -> None:
        return

    @property
    def guarantees(self) -> Guarantees:
        return NONE_KEPT

    @property
    def capacity(self) -> int:
        return sys.maxsize

    @property
    def live(self) -> int:
        return len(self.open)

    def name(self, start: str) -> str:
        """A name that was not given out before."""
        self._made += 1
        return f"{start}{self._made}"

    async def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: Snapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> MemorySandbox:
        self.owners.append(owner)
        if self._fault is not None:
            self._fault(owner)
        if missing := NONE_KEPT.missing(require):
            raise SandboxUnavailable(f"sandboxes in memory keep nothing: {', '.join(missing)}")
        if network != "none" or (environment is not None and snapshot is not None):
            raise SandboxError(f"no network '{network}' here, or both an environment and a snapshot given")
        limits, id = limits or Limits(), owner if owner not in self.open else self.name(f"{owner}#")
        sandbox = MemorySandbox(self, id, owner, limits)
        self.open[id] = sandbox
        try:
            sandbox.begin(environment or Environment())
            if snapshot is not None:
                await sandbox.restore(snapshot)
        except (SandboxError, OSError):
            await sandbox.kill()
            raise
        await sandbox.set_timeout(limits.wall_seconds)
        return sandbox

    async def connect(self, id: str) -> MemorySandbox:
        if id not in self.open:
            raise SandboxLost(f"no sandbox {id}")
        return self.open[id]

    async def load(self, path: Path) -> MemorySnapshot:
        from rollwright.sandbox import archive

        contents = _unpacked(archive.load(path), Limits())
        return MemorySnapshot(path.stem, contents, contents.pop(DATABASE, b""))

    def forget(self, sandbox: MemorySandbox) -> None:
        """It is killed."""
        self.open = {id: each for id, each in self.open.items() if each is not sandbox}

    async def close(self) -> None:
        for sandbox in list(self.open.values()):
            await sandbox.kill()
