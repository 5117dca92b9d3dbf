"""One sandbox on this machine: a folder, a database process, an interpreter process.

Role: implements `Sandbox` over zygote workers. Neighbours: `local` makes it, tools and rewards call it.
Invariants: calls run one after another; SQL is answered by a process that never runs agent code, so agent
Python cannot tamper with what a grader's query returns; a call that had to be cut costs the process that ran
it, never the files; only failures that the agent cannot bring about raise `SandboxLost`, everything else is a
status.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollwright.clock import Clock
from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox import files, owners
from rollwright.sandbox.base import Guarantees, Limits, Sandbox
from rollwright.sandbox.channel import Reply, Worker, WorkerGone, ZygoteProcess
from rollwright.sandbox.worker import DATABASE
from rollwright.types import CallStatus, Environment, ExecResult, File, Json, RowSet

_BUILD_SECONDS = 30.0
_GRACE_SECONDS = 0.5
"""SQL and programs are stopped from inside at their deadline; one that isn't is killed from outside so
much later."""
"""Exit code of a child that could not put its walls up."""


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
    database: Worker | None = None
    uses: int = 0

    @property
    def work(self) -> Path:
        """The sandbox's own folder; the only one its interpreter can write to."""
        return self.folder / "work"

    def fits(self, zygote: ZygoteProcess, limits: Limits) -> bool:
        """Whether another sandbox may use it."""
        return self.zygote is zygote and not zygote.dead and self.limits == limits and self.uses < _USES


class _Kind(enum.Enum):
    DATABASE = "database"
    INTERPRETER = "interpreter"


class LocalSandbox:
    """See `Sandbox`. Made by a provider, which is told at the end through `on_close`."""

    def __init__(
        self,
        slot: Slot,
        guarantees: Guarantees,
        clock: Clock,
        *,
        fork: Callable[[LocalSandbox], Awaitable[Sandbox]],
        on_close: Callable[[LocalSandbox, Slot | None], None],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.limits = limits = slot.limits
        self._slot, self._work, self._zygote = slot, slot.work, slot.zygote
        self._guarantees, self._clock = guarantees, clock
        self._fork, self._on_close = fork, on_close
        self._interpreter: Worker | None = None
        self._opened = self._stained = False
        self._script = ""
        self._turn = asyncio.Lock()
        self._lost = ""
        self._closing: asyncio.Task[None] | None = None
        # JSON writes a character as up to six bytes; three texts and the rows of one reply
        self._said_bytes = 32 * limits.output_bytes
        self._dump_bytes = max(self._said_bytes, 12 * limits.file_bytes)

    @property
    def guarantees(self) -> Guarantees:
        return self._guarantees

    async def build(self, environment: Environment, owner: str) -> None:
        """Make what is in it. Raises `SandboxError` where the environment's script fails."""
        self._slot.uses += 1
        if self._slot.uses == 1:
            self._slot.folder.mkdir()
        owners.record(self._slot.folder, owner, self._clock.wall())
        if self._slot.uses == 1:
            self._work.mkdir(mode=0o700)
        for file in environment.files:
            files.write_beneath(self._work, file.path, file.text.encode(), self.limits.file_bytes)
        if environment.sql:
            self._script = environment.sql
            async with self._turn:
                await self._worker(_Kind.DATABASE)

    async def exec(self, argv: Sequence[str], *, timeout: float, stdin: str = "") -> ExecResult:
        grace = timeout + _GRACE_SECONDS
        return await self._call(
            _Kind.INTERPRETER, grace, "exec", argv=list(argv), stdin=stdin, timeout=timeout
        )

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        return await self._call(_Kind.INTERPRETER, timeout, "python", code=code)

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        grace = timeout + _GRACE_SECONDS
        return await self._call(
            _Kind.DATABASE, grace, "sql", query=query, parameters=list(parameters), timeout=timeout
        )

    async def read_file(self, path: str) -> bytes:
        self._check()
        return files.read_beneath(self._work, path, self.limits.file_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        self._check()
        files.write_beneath(self._work, path, data, self.limits.file_bytes)

    async def snapshot(self) -> Environment:
        """Raises `SandboxError` where a file is no text or the database is larger than a file may be."""
        async with self._turn:
            self._check()
            sql, texts, size = "", [], 0
            for path in files.list_beneath(self._work):
                if path.partition("-")[0] == DATABASE:
                    continue  # with its journal
                data = files.read_beneath(self._work, path, self.limits.file_bytes)
                size += len(data)
                if size > 2 * self.limits.file_bytes:
                    raise SandboxError(f"its files hold more than {2 * self.limits.file_bytes} bytes")
                try:
                    texts.append(File(path=path, text=data.decode()))
                except UnicodeDecodeError as error:
                    raise SandboxError(f"{path} is not UTF-8 text; a snapshot holds text files") from error
            if (self._work / DATABASE).exists():
                await self._worker(_Kind.DATABASE)
                reply = await self._trusted("dump", limit=self.limits.file_bytes)
                if reply.status is not CallStatus.OK:
                    raise SandboxError(f"the database cannot be dumped: {reply.stderr or reply.status.value}")
                sql = reply.stdout
            return Environment(files=tuple(texts), sql=sql)

    async def fork(self) -> Sandbox:
        return await self._fork(self)

    async def close(self) -> None:
        # one task, so that a cancelled caller neither stops it nor starts a second
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._lost = self._lost or "closed"
        kept = None
        try:
            with contextlib.suppress(SandboxLost):  # a dead zygote took its workers along
                if self._turn.locked():
                    for worker in filter(None, (self._interpreter, self._slot.database)):
                        await self._zygote.end(worker.pid)  # wakes the call in flight
                    self._stained = True
            async with self._turn:
                clean = not self._stained and self._slot.fits(self._zygote, self.limits)
                for kind in (_Kind.INTERPRETER,) if clean else _Kind:
                    with contextlib.suppress(SandboxLost):
                        await self._end(kind)
            if self._slot.database is not None and not self._zygote.dead:
                files.empty_tree(self._work)
                kept = self._slot
            else:
                files.remove_tree(self._slot.folder)
        finally:
            self._on_close(self, kept)

    def _check(self) -> None:
        if not self._lost and self._zygote.dead:
            self._lost = "its zygote died"
        if self._lost:
            raise SandboxLost(f"sandbox {self.id}: {self._lost}")

    async def _worker(self, kind: _Kind) -> Worker:
        if kind is _Kind.INTERPRETER:
            if self._interpreter is None:
                self._interpreter = await self._started(self._work, self._said_bytes)
            return self._interpreter
        if self._slot.database is None:
            self._opened = False
            self._slot.database = await self._started(self._slot.folder, self._dump_bytes)
        if not self._opened:
            script, self._script = self._script, ""
            reply = await self._trusted("open", folder=str(self._work), script=script)
            if reply.status is not CallStatus.OK:
                raise SandboxError(f"the environment's SQL failed: {reply.stderr or reply.status.value}")
            self._opened = True
        return self._slot.database

    async def _started(self, folder: Path, reply_bytes: int) -> Worker:
        worker = await self._zygote.fork(folder, self.limits, reply_bytes)
        try:
            owners.record_worker(self._slot.folder, worker.pid)
            async with asyncio.timeout(_BUILD_SECONDS):
                await worker.ready()
            self._check()
        except (WorkerGone, TimeoutError) as error:
            worker.close()
            code = await self._zygote.end(worker.pid)
            self._lost = f"a worker could not be started: ended with {code} ({error or 'no answer'})"
            raise SandboxLost(f"sandbox {self.id}: {self._lost}") from error
        except BaseException:  # boundary: closed or failed meanwhile; the worker goes
            worker.close()
            await self._zygote.end(worker.pid)
            raise
        return worker

    async def _end(self, kind: _Kind) -> int:
        """End that process if there is one; its exit code."""
        if kind is _Kind.INTERPRETER:
            worker, self._interpreter = self._interpreter, None
        else:
            worker, self._slot.database = self._slot.database, None
        if worker is None:
            return 0
        try:
            return await self._zygote.end(worker.pid)
        finally:
            worker.close()

    async def _call(self, kind: _Kind, within: float, operation: str, /, **arguments: Json) -> ExecResult:
        """One request with its deadline; however it ends, the next call finds a worker in step or none."""
        async with self._turn:
            began = self._clock.now()
            self._check()
            try:
                worker = await self._worker(kind)
                async with asyncio.timeout(within):
                    reply = await worker.call(operation, **arguments)
            except TimeoutError:
                await self._end(kind)
                reply = Reply(n=0, status=CallStatus.TIMEOUT)
            except WorkerGone as gone:
                reply = await self._gone(kind, gone)
            except asyncio.CancelledError:
                await asyncio.shield(self._end(kind))  # a reply may be under way
                raise
            if kind is _Kind.DATABASE and reply.status in (CallStatus.TIMEOUT, CallStatus.MEMORY):
                self._stained = True
            self._check()  # the zygote may have died, or the sandbox been closed, under the call
            if kind is _Kind.INTERPRETER and reply.columns is not None:  # only the database gives result sets
                reply = await self._gone(kind, WorkerGone("gave a result set"))
            rows = None if reply.columns is None else RowSet(columns=reply.columns, rows=reply.rows)
            return ExecResult(
                status=reply.status,
                stdout=reply.stdout,
                stderr=reply.stderr,
                exit_code=reply.exit_code,
                value=reply.value,
                rows=rows,
                seconds=self._clock.now() - began,
            )

    async def _gone(self, kind: _Kind, gone: WorkerGone) -> Reply:
        """What a dead worker means. An interpreter runs agent code, so its death is the agent's doing
        until shown otherwise."""
        self._check()
        code = await self._end(kind)
        if kind is _Kind.DATABASE and code != -24:
            self._lost = f"its {kind.value} process ended with {code} ({gone})"
            self._check()
        if code == -24:  # SIGXCPU
            return Reply(n=0, status=CallStatus.TIMEOUT, stderr="out of CPU time")
        if code >= 0:
            return Reply(
                n=0, status=CallStatus.ERROR, stderr=f"the interpreter exited with {code}", exit_code=code
            )
        return Reply(n=0, status=CallStatus.LOST, stderr=f"the interpreter died: {gone}", exit_code=code)

    async def _trusted(self, operation: str, **arguments: Json) -> Reply:
        """A request of the host's own, on the database process."""
        assert self._slot.database is not None
        try:
            async with asyncio.timeout(_BUILD_SECONDS):
                return await self._slot.database.call(operation, **arguments)
        except (TimeoutError, WorkerGone) as error:
            self._stained = True
            self._lost = f"{operation} failed: {error or 'no answer'}"
            raise SandboxLost(f"sandbox {self.id}: {self._lost}") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._end(_Kind.DATABASE))
            raise
