"""The host's ends of the sockets to zygotes, agents inside sandboxes, and their workers.

Role: framing, deadlines, death. Neighbours: `launch` and `native` own a `Line`, `instance` calls a `Worker`.
Invariants: nothing a worker sends makes the host keep more than `reply_bytes`; a reply belongs to the request
it answers; when the other end of a line dies, every waiting request learns it at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from rollwright.errors import SandboxLost
from rollwright.sandbox.worker import READY
from rollwright.types import CallStatus, Json

ANSWER_SECONDS = 10.0
"""Who answers nothing for so long counts as dead."""
_MOST = 1 << 18
"""Bytes of one message of a line."""
_DESCRIPTORS = 4
_EARLY = 1 << 14
"""Bytes of a request that fit a socket's buffer before anybody reads."""

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


class NeverReady(WorkerGone):
    """It did before it served: its walls could not be put up."""


def pair() -> tuple[socket.socket, socket.socket]:
    """The host's end, which does not block, and a worker's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


class Worker:
    """One process in a sandbox: one request at a time. `forked` becomes what its parent said of it: it may be
    spoken to before."""

    def __init__(self, forked: asyncio.Future[Answer], connection: socket.socket, reply_bytes: int) -> None:
        self.forked = forked
        self._socket = connection
        self._limit = reply_bytes
        self._requests = 0
        self._ready = False

    def pid(self) -> int:
        """Its number where it was forked; 0 where that is not known, or it was not."""
        if not self.forked.done() or self.forked.cancelled() or self.forked.exception() is not None:
            return 0
        return int(self.forked.result().said.get("pid", 0))

    async def call(self, operation: str, **arguments: Json) -> Reply:
        """One request and its reply. No deadline of its own; after a cancellation the worker must be ended.

        Raises:
            NeverReady: its walls could not be put up.
            WorkerGone: it died or broke the protocol.
        """
        return await self._exchange(operation, (), arguments)

    async def ready(self) -> None:
        """Wait until it serves. Raises `NeverReady`."""
        if self._ready:
            return
        try:
            said = await self._receive(asyncio.get_running_loop(), len(READY))
        except (OSError, WorkerGone) as error:
            raise NeverReady(str(error)) from error
        if said != READY:
            raise NeverReady("said something before it was ready")
        self._ready = True

    async def hand(self, operation: str, descriptors: tuple[int, ...]) -> Reply:
        """As `call`; the descriptors follow the request, with a byte."""
        return await self._exchange(operation, descriptors, {})

    async def _exchange(
        self, operation: str, descriptors: tuple[int, ...], arguments: dict[str, Json]
    ) -> Reply:
        self._requests += 1
        loop = asyncio.get_running_loop()
        body = json.dumps({"n": self._requests, "op": operation, **arguments}).encode()
        try:
            await self._greeted(loop, struct.pack("!I", len(body)) + body)
            if descriptors:
                socket.send_fds(self._socket, [b"!"], descriptors)
            (size,) = struct.unpack("!I", await self._receive(loop, 4))
            if size > self._limit:
                raise WorkerGone(f"announced a reply of {size} bytes")
            reply = _replies.decode(await self._receive(loop, size))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WorkerGone(str(error)) from error
        if reply.n != self._requests or reply.status not in _SAID:
            raise WorkerGone("answered another request, or what no worker says")
        return reply

    async def _greeted(self, loop: asyncio.AbstractEventLoop, request: bytes) -> None:
        """Send the request; the first time it is on its way while the worker gets ready."""
        if self._ready:
            await loop.sock_sendall(self._socket, request)
            return
        try:
            await loop.sock_sendall(self._socket, request[:_EARLY])
        except OSError as error:
            raise NeverReady(str(error)) from error
        await self.ready()
        await loop.sock_sendall(self._socket, request[_EARLY:])

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


@dataclass
class Answer:
    """What the other end of a line said, and the descriptors that came with it; the taker closes them."""

    said: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class Line:
    """Requests over a SEQPACKET socket, one JSON message each way, with descriptors; answered in any order.
    All methods on one event loop. `unwanted` gets the answers that nobody waits for any more."""

    def __init__(
        self,
        end: socket.socket,
        name: str,
        *,
        died: Callable[[], None] = lambda: None,
        unwanted: Callable[[dict[str, Any]], None] = lambda said: None,
    ) -> None:
        self._socket, self._name, self._died, self._unwanted = end, name, died, unwanted
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._sent = 0
        self.dead = ""
        """Why; empty while it stands."""
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end.fileno(), self._readable)
        self._first = self._expect(0)

    async def ready(self) -> dict[str, Any]:
        """What the other end says first. Raises `SandboxLost` where it dies before."""
        return (await self.answer(self._first)).said

    def _readable(self) -> None:
        while not self.dead:
            descriptors: list[int] = []
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _MOST, _DESCRIPTORS)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                said = json.loads(data)
                waiting = self._waiting.pop(said["n"])
            except (ValueError, KeyError, TypeError):  # empty, or nothing that the other end would say
                Answer({}, descriptors).close()
                self.die(f"{self._name} died")
                return
            answer = Answer(said, descriptors)
            if waiting.done():
                answer.close()
                self._unwanted(said)
            else:
                waiting.set_result(answer)

    def _expect(self, number: int) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # may be nobody's
        self._waiting[number] = future
        return future

    def send(
        self, operation: str, descriptors: tuple[int, ...] = (), **arguments: Json
    ) -> asyncio.Future[Answer]:
        """One request; its answer. The descriptors stay the caller's. Raises `SandboxLost` where it is
        dead."""
        if self.dead:
            raise SandboxLost(self.dead)
        self._sent += 1
        future = self._expect(self._sent)
        data = json.dumps({"n": self._sent, "op": operation, **arguments}).encode()
        try:
            if descriptors:
                socket.send_fds(self._socket, [data], descriptors)
            else:
                self._socket.send(data)
        except OSError as error:  # also where its buffer is full: it has not read for long
            self.die(f"{self._name} takes nothing more ({error})")
        return future

    async def ask(self, operation: str, descriptors: tuple[int, ...] = (), **arguments: Json) -> Answer:
        """One request and its answer. Raises `SandboxLost` where none comes."""
        return await self.answer(self.send(operation, descriptors, **arguments))

    async def answer(self, future: asyncio.Future[Answer]) -> Answer:
        """Wait for it. Raises `SandboxLost` where it does not come."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await future
        except TimeoutError:
            self.die(f"{self._name} did not answer within {ANSWER_SECONDS:g} s")
            raise SandboxLost(self.dead) from None

    def die(self, why: str) -> None:
        """The other end is gone or useless."""
        if self.shut(why):
            self._died()

    def shut(self, why: str) -> bool:
        """Close this end; False where it was closed before."""
        if self.dead:
            return False
        self.dead = why
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(SandboxLost(why))
        return True
