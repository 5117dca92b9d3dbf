"""The host's end of the talk with the helper in a remote sandbox.

Role: starts the helper, sends requests as command lines, reads what they print. Neighbours: `instance`
decides what an answer means; `inside.ask` is the other end. Invariants: what the helper says is checked,
for it is not trusted; no more of it is kept than `reply_bytes`; a request is sent again under its own id,
so that it happens once.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Annotated, Literal

import msgspec

from rollwright.clock import Clock
from rollwright.errors import SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import Limits
from rollwright.sandbox.remote.adapter import Machine
from rollwright.sandbox.remote.bundle import bundle
from rollwright.sandbox.remote.patience import ASK_SECONDS, asked
from rollwright.types import CallStatus, Json

FOLDER = ".rollwright"
"""Everything of ours in a machine, below the folder where its commands start."""
_PROGRAM = f"{FOLDER}/helper.zip"
_INLINE_BYTES = 48 * 2**10
"""Of a request that travels in the command line: Linux takes 128 KiB in one word."""
_POLL_SECONDS = 5.0
"""How long one command waits for a call to end; longer calls are asked for again, so that no limit of a
vendor's on one request ends them."""
_SAID = frozenset(
    (
        CallStatus.OK,
        CallStatus.ERROR,
        CallStatus.TIMEOUT,
        CallStatus.MEMORY,
        CallStatus.OUTPUT,
        CallStatus.LOST,
    )
)

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Cell = None | bool | Int | float | str


class Reply(msgspec.Struct, kw_only=True):
    """What the helper answered."""

    status: CallStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    value: str | None = None
    columns: tuple[str, ...] | None = None
    rows: tuple[tuple[Cell, ...], ...] = ()
    data: bytes | None = None
    """In base64 on the wire."""
    kind: Literal["", "missing", "refused", "error"] = ""
    """What touching a file failed with."""
    errno: Int | None = None


class _Line(msgspec.Struct, kw_only=True):
    state: Literal["done", "pending", "gone", "file", "ready"]
    reply: Reply | None = None
    name: str = ""
    size: int = 0
    python: tuple[int, int] = (0, 0)
    work: str = ""


_lines = msgspec.json.Decoder(_Line)


class HelperGone(Exception):
    """It was killed from inside, or says what no helper says."""


class Line:
    """To one machine's helper. One request at a time, `cut` and signals besides."""

    def __init__(self, machine: Machine, limits: Limits, clock: Clock, python: str) -> None:
        self._machine, self._clock, self._python = machine, clock, python
        self._settings = base64.urlsafe_b64encode(msgspec.json.encode(limits)).decode()
        self._most = 4 * max(limits.disk_bytes, 32 * limits.output_bytes) // 3 + 2**20
        self.work = ""
        """The working folder, as the machine names it."""

    async def start(self) -> None:
        """Put the helper there, again where the agent may have touched it, and start it; one that runs ends.
        Raises `SandboxUnavailable` where the machine cannot run it."""
        made = await self._run(f"mkdir -p {FOLDER}", ASK_SECONDS)
        if made is None:
            raise SandboxUnavailable(f"{self._machine.id}: cannot make {FOLDER} where its commands start")
        await asked(
            self._clock,
            f"uploading the helper to {self._machine.id}",
            lambda timeout: self._machine.write(_PROGRAM, bundle(), timeout=timeout),
        )
        try:
            line = await self._said(f"start {FOLDER} {self._settings}", ASK_SECONDS)
        except HelperGone as error:
            raise SandboxUnavailable(
                f"the helper does not start on {self._machine.id}: {error}. Its image needs "
                f"`{self._python}`, 3.11 or newer, with sqlite3"
            ) from error
        if line.python < (3, 11):
            found = ".".join(map(str, line.python))
            raise SandboxUnavailable(f"the image has Python {found}; expected 3.11 or newer: take another")
        self.work = line.work

    async def call(self, number: str, operation: str, arguments: dict[str, Json], within: float) -> Reply:
        """One request. No deadline of its own beyond `within` for each command.

        Raises:
            HelperGone: it was killed under it.
            Unreachable, SandboxLost, SandboxUnavailable, DeadlineExceeded: the vendor's side.
        """
        request: dict[str, Json] = {"id": number, "op": operation, **arguments}
        request["poll"] = min(_POLL_SECONDS, within)
        word = await self._word(number, request)
        while True:
            line = await self._said(f"ask {FOLDER} {word}", _POLL_SECONDS + ASK_SECONDS)
            if line.state == "file":
                line = await self._long(line)
            if line.state == "done" and line.reply is not None and line.reply.status in _SAID:
                return line.reply
            if line.state != "pending":
                raise HelperGone("it was killed" if line.state == "gone" else "it said what no helper says")
            word = _encoded({"id": number, "op": "wait", "poll": _POLL_SECONDS})

    async def upload(self, data: bytes) -> dict[str, Json]:
        """The arguments that bring `data` along with a request."""
        if len(data) <= _INLINE_BYTES // 2:
            return {"data": base64.b64encode(data).decode()}
        name = "in-" + os.urandom(8).hex()
        await self._write(name, data)
        return {"file": name}

    async def tell(self, operation: Literal["cut", "stop", "continue", "ping"], number: str = "") -> bool:
        """A request that is answered at once, whatever call is running; whether it was heard."""
        try:
            line = await self._said(f"ask {FOLDER} {_encoded({'id': number, 'op': operation})}", ASK_SECONDS)
        except HelperGone:
            return False
        return line.state == "done"

    async def _word(self, number: str, request: dict[str, Json]) -> str:
        word = _encoded(request)
        if len(word) <= _INLINE_BYTES:
            return word
        name = f"in-{number}"
        await self._write(name, json.dumps(request).encode())
        return f"@{name}"

    async def _write(self, name: str, data: bytes) -> None:
        await asked(
            self._clock,
            f"uploading {len(data)} bytes to {self._machine.id}",
            lambda timeout: self._machine.write(f"{FOLDER}/{name}", data, timeout=timeout),
            ASK_SECONDS + len(data) / 2**20,
        )

    async def _long(self, line: _Line) -> _Line:
        if "/" in line.name or not line.name.startswith("out-") or not 0 <= line.size <= self._most:
            raise HelperGone(f"announced an answer of {line.size} bytes")
        path = f"{FOLDER}/{line.name}"
        answer = await asked(
            self._clock,
            f"downloading {line.size} bytes from {self._machine.id}",
            lambda timeout: self._machine.read(path, line.size, timeout=timeout),
            ASK_SECONDS + line.size / 2**20,
        )
        await self._run(f"rm -f {path}", ASK_SECONDS)
        return _decoded(answer)

    async def _said(self, words: str, seconds: float) -> _Line:
        try:
            printed = await self._run(f"{self._python} -I -S {_PROGRAM} {words}", seconds)
        except SandboxError as error:
            if type(error) is not SandboxError:
                raise
            raise HelperGone(str(error)) from error  # it printed more than ours does
        if printed is None:
            raise HelperGone("its program failed or is not there")
        return _decoded(printed.encode("utf-8", "replace"))

    async def _run(self, line: str, seconds: float) -> str | None:
        """What a command prints; None where it fails."""
        ran = await asked(
            self._clock,
            f"a command on {self._machine.id}",
            lambda timeout: self._machine.run(line, timeout=timeout),
            seconds,
        )
        return ran.stdout if ran.exit_code == 0 else None


def _encoded(request: dict[str, Json]) -> str:
    return base64.urlsafe_b64encode(json.dumps(request).encode()).decode()


def _decoded(printed: bytes) -> _Line:
    try:
        return _lines.decode(printed.strip())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HelperGone(f"it said what no helper says: {error}") from error


def failed(reply: Reply, path: str) -> Exception:
    """The exception that a reply about a file stands for."""
    number = reply.errno or 0
    match reply.kind:
        case "missing":
            return FileNotFoundError(number, reply.stderr, path)
        case "refused":
            return PermissionError(number, reply.stderr, path)
        case "error":
            return OSError(number, reply.stderr, path)
    if reply.status is CallStatus.LOST:
        return SandboxLost(f"the sandbox's helper failed: {reply.stderr}")
    return SandboxError(f"{path}: {reply.stderr or reply.status.value}")
