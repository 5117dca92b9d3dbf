"""One sandbox on a vendor's machine.

Role: implements `Sandbox` over a `Machine` and the helper in it. Neighbours: `provider` makes it, `line`
talks, `files` is its files. Invariants: calls run one after another; a deadline is kept inside the
machine, and outside by one that is longer, so that neither a dead machine nor a dead server is waited
for; the agent can end the helper, which costs it its variables and never the rollout; only a machine that
is gone or silent is `SandboxLost`.

Not covered: the helper runs as the agent's user, so agent code that means to can answer in its place, SQL
included. A grade that must hold against that comes from a sandbox of the grader's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from rollwright.clock import Clock
from rollwright.errors import DeadlineExceeded, SandboxError, SandboxLost
from rollwright.sandbox import archive
from rollwright.sandbox.base import Guarantees, Info, Limits, Sandbox, Snapshot, State
from rollwright.sandbox.remote.adapter import Forkable, Machine, Pausable, Unreachable
from rollwright.sandbox.remote.files import RemoteFiles
from rollwright.sandbox.remote.line import HelperGone, Line, Reply
from rollwright.sandbox.remote.patience import asked
from rollwright.sandbox.remote.snapshot import RemoteSnapshot
from rollwright.types import CallStatus, Environment, ExecResult, Json, RowSet

TRUSTED_SECONDS = 120.0
"""How long touching files or the database for the host may take."""
_SILENT_SECONDS = 60.0
"""A machine that has not answered so long after a call's deadline is lost."""
_BACKSTOP_SECONDS = 60.0
"""The vendor ends a sandbox so much later than we would."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Kinship:
    """Where a sandbox comes from and whom it is for."""

    owner: str
    network: str = "none"
    parent: str | None = None
    forked: Literal["filesystem", "live"] | None = None


class Maker:
    """What the provider does for its sandboxes."""

    def __init__(
        self,
        branch: Callable[[RemoteSandbox, RemoteSnapshot], Awaitable[Sandbox]],
        adopt: Callable[[RemoteSandbox, int], Awaitable[list[Sandbox]]],
        forget: Callable[[RemoteSandbox], None],
        lease_seconds: float,
    ) -> None:
        self.branch, self.adopt, self.forget = branch, adopt, forget
        self.lease_seconds = lease_seconds


class RemoteSandbox:
    """See `Sandbox`."""

    def __init__(
        self,
        machine: Machine,
        line: Line,
        backend: str,
        kinship: Kinship,
        guarantees: Guarantees,
        limits: Limits,
        clock: Clock,
        maker: Maker,
    ) -> None:
        self.id, self.limits, self.kinship, self.machine = machine.id, limits, kinship, machine
        self._line, self._backend, self._guarantees = line, backend, guarantees
        self._clock, self._maker = clock, maker
        self._files = RemoteFiles(self)
        self._turn = asyncio.Lock()
        self._lost = ""
        self._ended = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._paused: Literal["", "signal", "vendor"] = ""
        self._killing: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None

    @property
    def files(self) -> RemoteFiles:
        return self._files

    @property
    def guarantees(self) -> Guarantees:
        return self._guarantees

    def info(self) -> Info:
        state = State.KILLED if self._lost else State.PAUSED if self._paused else State.RUNNING
        return Info(
            id=self.id,
            backend=self._backend,
            owner=self.kinship.owner,
            state=state,
            guarantees=self._guarantees,
            limits=self.limits,
            network=self.kinship.network,
            parent=self.kinship.parent,
            forked=self.kinship.forked,
        )

    async def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        argv: list[Json] = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        return await self._call("exec", timeout, argv=argv, stdin=stdin, timeout=timeout)

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        result = await self._call("python", timeout, code=code, timeout=timeout)
        if result.rows is not None:  # only the database gives result sets
            return ExecResult(status=CallStatus.LOST, stderr="the interpreter gave a result set")
        return result

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        return await self._call("sql", timeout, query=query, parameters=list(parameters), timeout=timeout)

    async def snapshot(self) -> Snapshot:
        reply = await self.trusted("pack")
        if reply.status is not CallStatus.OK or reply.data is None:
            raise SandboxError(f"its files cannot be kept: {reply.stderr or reply.status.value}")
        return RemoteSnapshot(reply.data)

    async def restore(self, snapshot: Snapshot) -> None:
        if not isinstance(snapshot, RemoteSnapshot):
            raise SandboxError(f"snapshot {snapshot.id} is of another backend; expected a remote one")
        reply = await self.trusted("restore", snapshot.content)
        if reply.status is not CallStatus.OK:
            raise SandboxError(
                f"snapshot {snapshot.id} does not fit in: {reply.stderr or reply.status.value}"
            )

    async def fork(self, count: int = 1, *, live: bool = False) -> list[Sandbox]:
        if live:
            if not isinstance(self.machine, Forkable):
                raise SandboxError(
                    f"the backend {self._backend} has no live fork; 'e2b' and 'native' with live = true have"
                )
            async with self._turn:
                self._check()
                return await self._maker.adopt(self, count)
        taken = await self.snapshot()
        assert isinstance(taken, RemoteSnapshot)
        made: list[Sandbox] = []
        try:
            for _ in range(count):
                made.append(await self._maker.branch(self, taken))
        except BaseException:  # boundary: all or none
            await asyncio.gather(*(each.kill() for each in made), return_exceptions=True)
            raise
        return made

    async def pause(self) -> None:
        self._check()
        if self._paused:
            return
        self._running.clear()
        if isinstance(self.machine, Pausable) and not self._turn.locked():
            self._paused = "vendor"
            machine = self.machine
            await self._asked("pausing", lambda timeout: machine.pause(timeout=timeout))
        else:  # the vendor's pause would cut off a call in flight
            self._paused = "signal"
            await self._line.tell("stop")

    async def resume(self) -> None:
        self._check()
        if self._paused == "vendor" and isinstance(self.machine, Pausable):
            machine = self.machine
            await self._asked("resuming", lambda timeout: machine.resume(timeout=timeout))
        elif self._paused == "signal":
            await self._line.tell("continue")
        self._paused = ""
        self._running.set()

    async def set_timeout(self, seconds: float | None) -> None:
        self._check()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is None:
            await self.renew(self._maker.lease_seconds)
            return
        self._timer = asyncio.create_task(self._expire(seconds))
        await self.renew(seconds + _BACKSTOP_SECONDS)

    @property
    def leased(self) -> bool:
        """Whether the provider has to renew what the vendor gives it to live."""
        return self._timer is None and not self._lost and self._paused != "vendor"

    async def renew(self, seconds: float) -> None:
        """Let the vendor end it so many seconds from now."""
        await self._asked(
            "setting the lifetime", lambda timeout: self.machine.set_timeout(seconds, timeout=timeout)
        )

    async def _expire(self, seconds: float) -> None:
        await self._clock.sleep(max(0.0, seconds))
        self._lost = self._lost or "its time is up"
        await self.kill()

    async def kill(self) -> None:
        if self._killing is None:  # one task: a cancelled caller neither stops it nor starts a second
            self._killing = asyncio.create_task(self._kill())
        await asyncio.shield(self._killing)

    async def _kill(self) -> None:
        self._end("killed")
        try:
            await asked(self._clock, f"killing {self.id}", lambda timeout: self.machine.kill(timeout=timeout))
        except SandboxLost:
            pass  # the vendor ended it before
        finally:
            self._maker.forget(self)

    def _end(self, why: str) -> None:
        self._lost = self._lost or why
        self._ended.set()
        if self._timer is not None and self._timer is not asyncio.current_task():
            self._timer.cancel()

    def _check(self) -> None:
        if self._lost:
            raise SandboxLost(f"sandbox {self.id}: {self._lost}")

    async def ping(self) -> None:
        """Raise `SandboxLost` where it does not answer."""
        self._check()
        if not await self._guarded(self._line.tell("ping")):
            async with self._turn:
                await self._restart()

    async def adopt(self, environment: Environment, owner: str) -> None:
        """Put in what an environment holds, for `owner`; the label at the vendor's stays, which says whose
        process it is of. Raises `SandboxError` where the environment's SQL failed."""
        self.kinship = replace(self.kinship, owner=owner)
        if environment.files:
            files = [(each.path, each.text.encode()) for each in environment.files]
            await self._files.upload(archive.pack(files))
        if environment.sql:
            reply = await self.trusted("open", script=environment.sql)
            if reply.status is not CallStatus.OK:
                raise SandboxError(f"the environment's SQL failed: {reply.stderr or reply.status.value}")

    async def trusted(self, operation: str, data: bytes | None = None, **arguments: Json) -> Reply:
        """A request that runs no agent code; a helper that was killed is started again for it."""
        async with self._turn:
            self._check()
            if self._paused == "vendor" and not await self._resumed(TRUSTED_SECONDS):
                raise SandboxError(f"sandbox {self.id} is paused; resume it first")
            if data is not None:
                arguments |= await self._guarded(self._line.upload(data))
            try:
                return await self._request(operation, TRUSTED_SECONDS, arguments)
            except HelperGone:  # the agent ended it; what it held of the request may be lost with it
                if data is not None:
                    arguments |= await self._guarded(self._line.upload(data))
                try:
                    return await self._request(operation, TRUSTED_SECONDS, arguments)
                except HelperGone as gone:
                    raise SandboxError(f"sandbox {self.id}: {operation} failed twice: {gone}") from gone

    async def _call(self, operation: str, within: float, **arguments: Json) -> ExecResult:
        async with self._turn:
            began = self._clock.now()
            self._check()
            if not await self._resumed(within):
                return ExecResult(status=CallStatus.TIMEOUT, stderr="the sandbox is paused", seconds=within)
            try:
                reply = await self._request(operation, within, arguments)
            except HelperGone as gone:
                why = f"the sandbox's helper was killed ({gone}); its variables are gone"
                reply = Reply(status=CallStatus.LOST, stderr=why)
            limit = self.limits.output_bytes  # a helper that the agent replaced may say more
            return ExecResult(
                status=reply.status,
                stdout=reply.stdout[:limit],
                stderr=reply.stderr[:limit],
                exit_code=reply.exit_code,
                value=None if reply.value is None else reply.value[:limit],
                rows=None if reply.columns is None else RowSet(columns=reply.columns, rows=reply.rows),
                seconds=self._clock.now() - began,
            )

    async def _resumed(self, within: float) -> bool:
        """Wait while it is paused, `within` seconds at most."""
        if self._running.is_set():
            return True
        waiting = asyncio.ensure_future(self._running.wait())
        ending = asyncio.ensure_future(self._ended.wait())
        timer = asyncio.ensure_future(self._clock.sleep(within))
        try:
            await asyncio.wait({waiting, ending, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (waiting, ending, timer):
                each.cancel()
        self._check()
        return self._running.is_set()

    async def _request(self, operation: str, within: float, arguments: dict[str, Any]) -> Reply:
        """One request; however it ends, the next one finds a helper that is free. Raises `HelperGone` where
        it had to be started again."""
        number = uuid.uuid4().hex
        try:
            async with asyncio.timeout(within + _SILENT_SECONDS):
                return await self._guarded(self._line.call(number, operation, arguments, within))
        except HelperGone:
            await self._restart()
            raise
        except (TimeoutError, Unreachable) as error:
            raise await self._silent(error) from error
        except asyncio.CancelledError:
            if not self._lost:
                await asyncio.shield(self._cut(number))
            raise

    async def _cut(self, number: str) -> None:
        with contextlib.suppress(SandboxError, DeadlineExceeded):  # the next call finds out
            await self._line.tell("cut", number)

    async def _restart(self) -> None:
        try:
            await self._guarded(self._line.start())
        except SandboxError as error:
            if isinstance(error, SandboxLost):
                raise
            raise await self._silent(error) from error

    async def _silent(self, error: BaseException) -> SandboxLost:
        """End it, and what to raise: a machine that does not answer is of no use."""
        self._end(f"it does not answer: {error or 'past every deadline'}")
        with contextlib.suppress(SandboxError, DeadlineExceeded):
            await self.kill()
        return SandboxLost(f"sandbox {self.id}: {self._lost}")

    async def _asked(self, what: str, ask: Callable[[float], Awaitable[T]]) -> T:
        return await self._guarded(asked(self._clock, f"{what} {self.id}", ask))

    async def _guarded(self, work: Awaitable[T]) -> T:
        """What `work` gives, unless the sandbox ends first."""
        task = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._check()
            try:
                return task.result()
            except SandboxLost as error:
                self._check()
                self._end(str(error))
                self._maker.forget(self)
                raise
        finally:
            ending.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):  # boundary: nobody waits for it
                    await task
