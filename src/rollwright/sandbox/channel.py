"""The host's ends of the sockets to the zygote and to its workers.

Role: framing, deadlines, death. Neighbours: `local` owns a `ZygoteProcess`, `instance` calls a `Worker`.
Invariants: nothing a worker sends makes the host keep more than `reply_bytes`; a reply belongs to the request
it answers; a worker forked for a caller that went away is ended; when the zygote dies, its workers' process
groups are killed and every waiting call learns it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollwright.clock import Clock
from rollwright.errors import SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import Limits
from rollwright.sandbox.worker import READY
from rollwright.types import CallStatus, Json

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from rollwright.sandbox.zygote import main; main()"
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_ANSWER_SECONDS = 10.0
"""A zygote that answers nothing for so long counts as dead."""


_SAID = frozenset({CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT, CallStatus.MEMORY, CallStatus.OUTPUT})
"""What a worker may say of a call; the host itself says the rest."""

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Cell = None | bool | Int | float | str


class Reply(msgspec.Struct, kw_only=True):
    """What a worker answered; checked, for a worker is not trusted."""

    n: int
    status: CallStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    value: str | None = None
    columns: tuple[str, ...] | None = None
    rows: tuple[tuple[Cell, ...], ...] = ()


_replies = msgspec.json.Decoder(Reply)


class WorkerGone(Exception):
    """The worker closed its end, or said something no worker says."""


class Worker:
    """One process in a sandbox: one request at a time."""

    def __init__(self, pid: int, connection: socket.socket, reply_bytes: int) -> None:
        self.pid = pid
        self._socket = connection
        self._limit = reply_bytes
        self._requests = 0

    async def call(self, operation: str, **arguments: Json) -> Reply:
        """One request and its reply. No deadline of its own; after a cancellation the worker must be ended.

        Raises:
            WorkerGone: it died or broke the protocol.
        """
        self._requests += 1
        loop = asyncio.get_running_loop()
        body = json.dumps({"n": self._requests, "op": operation, **arguments}).encode()
        try:
            await loop.sock_sendall(self._socket, struct.pack("!I", len(body)) + body)
            (size,) = struct.unpack("!I", await self._receive(loop, 4))
            if size > self._limit:
                raise WorkerGone(f"announced a reply of {size} bytes")
            reply = _replies.decode(await self._receive(loop, size))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WorkerGone(str(error)) from error
        if reply.n != self._requests or reply.status not in _SAID:
            raise WorkerGone("answered another request, or what no worker says")
        return reply

    async def ready(self) -> None:
        """Wait until its walls are up and it serves.

        Raises:
            WorkerGone: they could not be put up.
        """
        if await self._receive(asyncio.get_running_loop(), len(READY)) != READY:
            raise WorkerGone("said something before it was ready")

    async def _receive(self, loop: asyncio.AbstractEventLoop, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await loop.sock_recv(self._socket, min(size - len(data), 1 << 18))
            if not piece:
                raise WorkerGone("closed its end")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Close the host's end."""
        self._socket.close()


class ZygoteProcess:
    """The zygote as a subprocess. All methods on one event loop."""

    def __init__(self, *, confined: bool, log: Path, clock: Clock) -> None:
        self._confined, self._log, self._clock = confined, log, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._sent = 0
        self._pids: set[int] = set()
        self.dead = True

    def _settings(self) -> str:
        interpreter = os.path.realpath(sys.executable)
        readable = {path for path in (*_SYSTEM, interpreter) if os.path.exists(path)}
        readable |= {f"{sys.base_prefix}/{part}" for part in ("lib", "lib64", "bin")}
        return json.dumps(
            {
                "confined": self._confined,
                "readable": sorted(filter(os.path.exists, readable)),
                "devices": list(filter(os.path.exists, _DEVICES)),
                "environment": {
                    "PATH": f"{os.path.dirname(interpreter)}:/usr/bin:/bin",
                    "LANG": "C.UTF-8",
                },
            }
        )

    async def start(self) -> None:
        """Raises `SandboxUnavailable` where it doesn't come up."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(__file__).parents[2])
        command = [
            os.path.realpath(sys.executable),
            "-I",
            "-S",
            "-u",
            "-c",
            _BOOT,
            source,
            str(theirs.fileno()),
        ]
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - once, 1 ms; asyncio would start a thread
                [*command, self._settings()],
                pass_fds=[theirs.fileno()],
                env={"LANG": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ours.setblocking(False)
        self._socket = ours
        self.dead = False
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)
        try:
            await self._answer(self._expect(0))
        except SandboxLost as error:
            await self.close()
            said = self._log.read_text(errors="replace")[-2000:].strip()
            raise SandboxUnavailable(
                f"the sandbox zygote did not start; it said: {said or 'nothing'}"
            ) from error

    def _readable(self) -> None:
        while not self.dead:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._die()
                return
            reply = json.loads(data)
            waiting = self._waiting.pop(reply["n"])
            if "pid" in reply and reply["n"]:
                self._pids.add(reply["pid"])
            if not waiting.done():
                waiting.set_result(reply)
            elif "pid" in reply:
                self._send({"op": "end", "pid": reply["pid"]})  # nobody waits for that worker any more

    def _expect(self, number: int) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # may be nobody's
        self._waiting[number] = future
        return future

    def _send(
        self, request: dict[str, Json], descriptors: tuple[int, ...] = ()
    ) -> asyncio.Future[dict[str, Any]]:
        if self.dead:
            raise SandboxLost("the sandbox zygote is gone")
        self._sent += 1
        future = self._expect(self._sent)
        if request["op"] == "end":
            self._pids.discard(int(request["pid"]))
        try:
            socket.send_fds(self._socket, [json.dumps({"n": self._sent, **request}).encode()], descriptors)
        except OSError:
            self._die()
        return future

    async def _answer(self, future: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await future
        except TimeoutError:
            self._die()
            raise SandboxLost(f"the sandbox zygote did not answer within {_ANSWER_SECONDS:g} s") from None

    async def fork(self, folder: Path, limits: Limits, reply_bytes: int) -> Worker:
        """A worker in `folder`. Raises `SandboxLost` where the zygote is dead."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        future = None
        try:
            with theirs:
                request = {"op": "fork", "folder": str(folder), "limits": msgspec.to_builtins(limits)}
                future = self._send(request, (theirs.fileno(),))
            return Worker((await self._answer(future))["pid"], ours, reply_bytes)
        except BaseException:  # boundary: whatever ends the wait, socket and process go
            ours.close()
            if future is not None and future.done() and not (future.cancelled() or future.exception()):
                self._send({"op": "end", "pid": future.result()["pid"]})
            raise

    async def end(self, pid: int) -> int:
        """Kill a worker and its descendants: its exit code, negative for the signal that ended it (-9 may
        be ours). A worker that was ended before gives 0."""
        return int((await self._answer(self._send({"op": "end", "pid": pid})))["status"])

    def _die(self) -> None:
        """The zygote is gone or useless: its workers go too. All but escaped ones die with it; this gets
        their groups."""
        if self._shut("the sandbox zygote died") and self._process is not None:
            self._process.kill()
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _shut(self, why: str) -> bool:
        if self.dead:
            return False
        self.dead = True
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(SandboxLost(why))
        return True

    async def close(self) -> None:
        """End it with all its workers; idempotent."""
        process, self._process = self._process, None
        self._shut("the sandbox provider was closed")
        if process is None:
            return
        end = self._clock.now() + _ANSWER_SECONDS
        while process.poll() is None:
            if self._clock.now() > end:
                process.kill()
            await self._clock.sleep(0.002)
