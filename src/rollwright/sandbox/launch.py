"""A zygote as a subprocess of the host.

Role: starts it, tells its death, ends it. Neighbours: `local` and `native` own one each, `bubblewrap` one a
sandbox. Invariants: it gets
no environment, no descriptors and no arguments but what is written here; a zygote that does not come up is an
error with what it said; its workers end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.clock import Clock
from rollwright.errors import SandboxLost, SandboxUnavailable
from rollwright.sandbox.channel import ANSWER_SECONDS, Line
from rollwright.types import Json

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main()"
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
SOURCE = Path(__file__).parents[2]
"""Folder that the package lies in."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def interpreter() -> str:
    """The Python that runs in sandboxes: this one, without its virtual environment."""
    return os.path.realpath(sys.executable)


def readable() -> list[str]:
    """Paths of the system and the interpreter that programs in a sandbox need to read."""
    found = {path for path in (*_SYSTEM, interpreter()) if os.path.exists(path)}
    found |= {f"{sys.base_prefix}/{part}" for part in ("lib", "lib64", "bin")}
    return sorted(filter(os.path.exists, found))


def settings(variables: Mapping[str, str] | None = None, **more: Json) -> dict[str, Json]:
    """What every zygote is told; `variables` of the environment beyond the usual."""
    path = f"{os.path.dirname(interpreter())}:/usr/bin:/bin"
    return {
        "readable": list(readable()),
        "devices": [path for path in _DEVICES if os.path.exists(path)],
        "environment": {"PATH": path, "LANG": "C.UTF-8", **(variables or {})},
        **more,
    }


class ZygoteProcess:
    """`module`'s `main` in a Python of its own. All methods on one event loop."""

    def __init__(
        self,
        module: str,
        told: Mapping[str, Json],
        *,
        log: Path,
        clock: Clock,
        prefix: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        unwanted: Callable[[dict[str, Any]], None] = lambda said: None,
    ) -> None:
        self._module, self._told, self.log, self._clock = module, told, log, clock
        self._prefix, self._descriptors, self._unwanted = prefix, descriptors, unwanted
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self.pid = 0
        self.greeting: dict[str, Any] = {}
        """What it said when it was ready."""
        self.groups: set[int] = set()
        """Process groups that end with it: all but escaped processes do by themselves."""

    @property
    def line(self) -> Line:
        """Raises `SandboxLost` where it was not started."""
        if self._line is None:
            raise SandboxLost("the sandbox zygote was not started")
        return self._line

    @property
    def dead(self) -> str:
        """Why; empty while it serves."""
        return self._line.dead if self._line is not None else "it was not started"

    async def start(self) -> None:
        """Raises `SandboxUnavailable` where it doesn't come up. `prefix` gets `descriptors` under the same
        numbers; they stay the caller's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(SOURCE)
        command = [interpreter(), "-I", "-S", "-u", "-c", _BOOT.format(self._module), source]
        with theirs, self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - once, 1 ms; asyncio would start a thread
                [*self._prefix, *command, str(theirs.fileno()), json.dumps(self._told)],
                pass_fds=[theirs.fileno(), *self._descriptors],
                env={"LANG": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid
        self._line = Line(ours, "the sandbox zygote", died=self._die, unwanted=self._unwanted)
        try:
            self.greeting = await self._line.ready()
        except SandboxLost as error:
            await self.close()
            said = self.log.read_text(errors="replace")[-2000:].strip()
            raise SandboxUnavailable(
                f"the sandbox zygote did not start; it said: {said or 'nothing'}"
            ) from error

    def _die(self) -> None:
        if self._process is not None:
            self._process.kill()
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    async def close(self) -> None:
        """End it with all its workers; idempotent."""
        process, self._process = self._process, None
        if self._line is not None:
            self._line.shut("the sandbox provider was closed")
        if process is None:
            return
        end = self._clock.now() + ANSWER_SECONDS
        while process.poll() is None:
            if self._clock.now() > end:
                process.kill()
            await self._clock.sleep(0.002)
