"""One sandbox on this machine: calls to its interpreter, its database and its programs.

Role: implements `Sandbox` over a `Place`. Neighbours: `provider` makes it, tools and rewards call it.
Invariants: calls run one after another; SQL and programs are answered by processes that never run agent
Python, so it cannot tamper with what a grader is told; a call that had to be cut costs the process that ran
it, never the files; only failures that the agent cannot bring about raise `SandboxLost`, everything else is a
status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollwright.clock import Clock
from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Files, Guarantees, Info, Sandbox, Snapshot, State
from rollwright.sandbox.channel import NeverReady, Reply, Worker, WorkerGone
from rollwright.sandbox.guarded import GuardedFiles
from rollwright.sandbox.place import Kind, Place
from rollwright.types import CallStatus, Environment, ExecResult, Json, RowSet

_BUILD_SECONDS = 30.0
_GRACE_SECONDS = 0.5
"""SQL and programs are stopped from inside at their deadline; one that isn't is killed from outside so
much later."""
_CPU = -24
"""Exit code of SIGXCPU."""


class LocalSandbox:
    """See `Sandbox`. Made by a provider, which makes its forks and is told at the end through `on_end`."""

    def __init__(
        self,
        place: Place,
        guarantees: Guarantees,
        clock: Clock,
        *,
        network: str = "none",
        fork: Callable[[LocalSandbox, Snapshot], Awaitable[LocalSandbox]],
        adopt: Callable[[LocalSandbox, Place], Awaitable[LocalSandbox]],
        on_end: Callable[[LocalSandbox], None],
    ) -> None:
        self.id, self.limits = place.id, place.limits
        self.network = network
        self._place, self._guarantees, self._clock = place, guarantees, clock
        self._fork, self._adopt, self._on_end = fork, adopt, on_end
        self.files: Files = GuardedFiles(place.files, self._check)
        self._workers: dict[Kind, Worker] = {}
        self._running = asyncio.Event()  # not set while it is paused
        self._running.set()
        self._opened = self._stained = False
        self._behind: set[Kind] = set()  # whose working folder is not the sandbox's any more
        self._script, self._owner = "", ""
        self._turn = asyncio.Lock()
        self._lost = ""
        self._ending: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        # JSON writes a character as up to six bytes; three texts and the rows of one reply
        self._said_bytes = 32 * self.limits.output_bytes

    @property
    def guarantees(self) -> Guarantees:
        return self._guarantees

    def info(self) -> Info:
        lost = self._lost or self._place.lost
        state = State.KILLED if lost else State.RUNNING if self._running.is_set() else State.PAUSED
        return Info(
            id=self.id,
            backend=self._place.backend,
            owner=self._owner,
            state=state,
            guarantees=self._guarantees,
            limits=self.limits,
            network=self.network,
            parent=self._place.parent,
            forked=self._place.forked,
        )

    async def ping(self) -> None:
        """Raises `SandboxLost` where it does not stand."""
        self._check()
        await self._place.ping()

    async def adopt(self, environment: Environment, owner: str) -> None:
        """Belong to `owner` and hold `environment`; for a sandbox in which nothing has been done. Raises
        `SandboxError` where the environment's script fails."""
        self._owner = owner
        self._place.owned(owner)
        if self.limits.wall_seconds is not None:
            await self.set_timeout(self.limits.wall_seconds)
        for file in environment.files:
            await self._place.files.write(file.path, file.text.encode())
        if environment.sql:
            self._script = environment.sql
            async with self._turn:
                try:
                    await self._worker(Kind.DATABASE)
                except WorkerGone as gone:
                    await self._end(Kind.DATABASE)
                    raise SandboxError(f"sandbox {self.id}: its database could not be made: {gone}") from gone

    async def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        grace = timeout + _GRACE_SECONDS
        return await self._call(Kind.PROGRAMS, grace, "exec", argv=argv, stdin=stdin, timeout=timeout)

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        return await self._call(Kind.INTERPRETER, timeout, "python", code=code)

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        grace = timeout + _GRACE_SECONDS
        return await self._call(
            Kind.DATABASE, grace, "sql", query=query, parameters=list(parameters), timeout=timeout
        )

    async def snapshot(self) -> Snapshot:
        async with self._turn:
            self._check()
            return await self._kept()

    async def _kept(self) -> Snapshot:
        """What is there now. The database is closed for it, and whoever stays is told of a new folder."""
        await self._let_go()
        snapshot = await self._place.snapshot()
        if self._place.moves:
            self._behind.update(self._workers.keys() - {Kind.DATABASE})
        return snapshot

    async def _let_go(self) -> None:
        """Have the database's file closed."""
        if Kind.DATABASE not in self._workers or not self._opened:
            return
        self._opened = False
        try:
            await self._trusted("close")
        except WorkerGone:  # that closes it too
            await self._end(Kind.DATABASE)

    async def restore(self, snapshot: Snapshot) -> None:
        async with self._turn:
            self._check()
            for kind in Kind:
                await self._end(kind)
            self._opened = False
            self._script = ""
            await self._place.restore(snapshot)

    async def fork(self, count: int = 1, *, live: bool = False) -> list[Sandbox]:
        if count < 1:
            raise ValueError(f"a fork makes at least one sandbox, got {count}")
        if live:
            return await self._made(self._branch, count)
        snapshot = await self.snapshot()
        try:
            return await self._made(lambda: self._fork(self, snapshot), count)
        finally:
            await snapshot.drop()

    @staticmethod
    async def _made(make: Callable[[], Awaitable[Sandbox]], count: int) -> list[Sandbox]:
        made: list[Sandbox] = []
        try:
            for _ in range(count):
                made.append(await make())
        except BaseException:  # boundary: all of them or none
            for each in made:
                await each.kill()
            raise
        return made

    async def _branch(self) -> Sandbox:
        async with self._turn:
            self._check()
            worker = await self._worker(Kind.INTERPRETER)
            await self._let_go()
            try:
                place, copy = await self._place.branch(worker, self._said_bytes)
            except WorkerGone as gone:
                reply = await self._gone(Kind.INTERPRETER, gone)
                raise SandboxError(f"sandbox {self.id}: no live fork could be made: {reply.stderr}") from gone
            except asyncio.CancelledError:
                await asyncio.shield(self._end(Kind.INTERPRETER))  # an answer may be under way
                raise
            self._behind.update(self._workers.keys() - {Kind.DATABASE})
        branch = await self._adopt(self, place)
        branch._workers[Kind.INTERPRETER] = copy
        return branch

    async def pause(self) -> None:
        self._check()
        self._running.clear()
        await self._place.freeze(True)

    async def resume(self) -> None:
        self._check()
        await self._place.freeze(False)
        self._running.set()

    async def set_timeout(self, seconds: float | None) -> None:
        self._check()
        if seconds is not None and not seconds > 0:
            raise ValueError(f"a sandbox lives more than 0 seconds, got {seconds}")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.create_task(self._expire(seconds))

    async def _expire(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._timer = None
        self._lost = self._lost or f"its {seconds:g} s were over"
        await self.kill()

    async def kill(self) -> None:
        # one task, so that a cancelled caller neither stops it nor starts a second
        if self._ending is None:
            self._ending = asyncio.create_task(self._kill())
        await asyncio.shield(self._ending)

    async def _kill(self) -> None:
        self._lost = self._lost or "killed"
        self._running.set()
        if self._timer is not None:
            self._timer.cancel()
        try:
            kept = await self._place.leave(clean=not self._stained and not self._turn.locked())
            async with self._turn:  # a call in flight has found its worker gone
                for kind, worker in self._workers.items():
                    if not (kept and kind is Kind.DATABASE):
                        worker.close()
                self._workers.clear()
        finally:
            self._on_end(self)

    def _check(self) -> None:
        if not self._lost:
            self._lost = self._place.lost
        if self._lost:
            raise SandboxLost(f"sandbox {self.id}: {self._lost}")

    async def _worker(self, kind: Kind) -> Worker:
        if (worker := self._workers.get(kind)) is None:
            if kind is Kind.DATABASE:
                self._opened = False
            worker = self._workers[kind] = self._place.fork(kind, self._said_bytes)
        if kind is Kind.DATABASE and not self._opened:
            script, self._script = self._script, ""
            reply = await self._trusted("open", folder=self._place.work, script=script)
            if reply.status is not CallStatus.OK:
                raise SandboxError(f"the environment's SQL failed: {reply.stderr or reply.status.value}")
            self._opened = True
        return worker

    async def _end(self, kind: Kind) -> int:
        """End that process if there is one; its exit code."""
        worker = self._workers.pop(kind, None)
        self._behind.discard(kind)
        if worker is None:
            return 0
        try:
            return await self._place.end(worker)
        finally:
            worker.close()

    async def _call(self, kind: Kind, within: float, operation: str, /, **arguments: Json) -> ExecResult:
        """One request with its deadline; however it ends, the next call finds a worker in step or none."""
        async with self._turn:
            began = self._clock.now()
            self._check()
            try:
                async with asyncio.timeout(within):
                    await self._running.wait()
                self._check()
                within -= self._clock.now() - began
                worker = await self._worker(kind)
                if kind in self._behind:
                    arguments["moved"] = self._place.work
                    self._behind.remove(kind)
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
            if kind is Kind.DATABASE and reply.status in (CallStatus.TIMEOUT, CallStatus.MEMORY):
                self._stained = True
            self._check()  # the place may have been lost, or the sandbox killed, under the call
            if kind is not Kind.DATABASE and reply.columns is not None:  # only the database gives result sets
                reply = await self._gone(kind, WorkerGone("gave a result set"))
            ended = kind is Kind.PROGRAMS and reply.status is CallStatus.ERROR and reply.exit_code == -9
            if ended and self._place.out_of_memory():
                reply.status = CallStatus.MEMORY
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

    async def _gone(self, kind: Kind, gone: WorkerGone) -> Reply:
        """What a dead worker means. An interpreter runs agent code, so its death is the agent's doing
        until shown otherwise."""
        self._check()
        code = await self._end(kind)
        if isinstance(gone, NeverReady):
            self._lost = f"a worker could not be started: ended with {code} ({gone})"
            self._check()
        if code < 0 and self._place.out_of_memory():
            self._stained = True
            return Reply(
                n=0, status=CallStatus.MEMORY, stderr="the sandbox was out of memory", exit_code=code
            )
        if kind is Kind.DATABASE and code != _CPU and self._place.guarded:
            self._lost = f"its {kind.value} process ended with {code} ({gone})"
            self._check()
        if code == _CPU:
            return Reply(n=0, status=CallStatus.TIMEOUT, stderr="out of CPU time")
        if code >= 0:
            return Reply(
                n=0, status=CallStatus.ERROR, stderr=f"the {kind.value} exited with {code}", exit_code=code
            )
        return Reply(n=0, status=CallStatus.LOST, stderr=f"the {kind.value} died: {gone}", exit_code=code)

    async def _trusted(self, operation: str, **arguments: Json) -> Reply:
        """A request of the host's own, on the database process."""
        database = self._workers[Kind.DATABASE]
        try:
            async with asyncio.timeout(_BUILD_SECONDS):
                return await database.call(operation, **arguments)
        except (TimeoutError, WorkerGone) as error:
            self._stained = True
            if isinstance(error, WorkerGone) and not self._place.guarded:
                raise  # the agent may have ended it
            self._lost = f"{operation} failed: {error or 'no answer'}"
            raise SandboxLost(f"sandbox {self.id}: {self._lost}") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._end(Kind.DATABASE))
            raise
