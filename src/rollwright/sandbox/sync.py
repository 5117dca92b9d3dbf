"""Sandboxes without `await`, for plain scripts, notebooks and code that blocks.

Role: the sync face of the sandbox seam. Neighbours: any `SandboxProvider`; `background` runs it. Invariants:
a caller may have a running event loop of its own (which is blocked meanwhile), and several threads may call;
Ctrl-C cancels the call it interrupts, whose sandboxes are killed where they came all the same, but never a
`kill` or `close`; `close` ends every sandbox, and is tried when the interpreter ends without it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rollwright.errors import SandboxLost
from rollwright.sandbox.background import Background
from rollwright.sandbox.base import (
    Files,
    GuaranteeName,
    Guarantees,
    Info,
    Limits,
    Sandbox,
    SandboxProvider,
    Snapshot,
)
from rollwright.types import Environment, ExecResult, Json


class SyncSnapshot:
    """A `Snapshot`; its methods block."""

    def __init__(self, background: Background, snapshot: Snapshot) -> None:
        self._background = background
        self._snapshot = snapshot
        self.id = snapshot.id

    def save(self, folder: Path) -> Path:
        """Keep it on disk, named by its content; gives the path."""
        return self._background.run(self._snapshot.save(folder))

    def drop(self) -> None:
        """Free it; idempotent. Sandboxes that started from it go on."""
        self._background.finish(self._snapshot.drop())


class SyncFiles:
    """The `Files` of a sandbox; the methods block and raise as there."""

    def __init__(self, background: Background, files: Files) -> None:
        self._background = background
        self._files = files

    def read(self, path: str) -> bytes:
        """Contents of a file."""
        return self._background.run(self._files.read(path))

    def write(self, path: str, data: bytes) -> None:
        """Replace a file's contents, making folders."""
        self._background.run(self._files.write(path, data))

    def list(self, path: str = "") -> list[str]:
        """Paths of all regular files in that folder and below."""
        return self._background.run(self._files.list(path))

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with all that is in it."""
        self._background.run(self._files.remove(path))

    def upload(self, archive: bytes, path: str = "") -> None:
        """Unpack a tar archive into that folder."""
        self._background.run(self._files.upload(archive, path))

    def download(self, path: str = "") -> bytes:
        """That folder's regular files as a tar archive."""
        return self._background.run(self._files.download(path))


class SyncSandbox(contextlib.AbstractContextManager["SyncSandbox"]):
    """A `Sandbox`; its methods block and raise as there. As a context manager it is killed at the end."""

    def __init__(self, background: Background, sandbox: Sandbox) -> None:
        self._background = background
        self._sandbox = sandbox
        self.id = sandbox.id
        self.limits = sandbox.limits

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def files(self) -> SyncFiles:
        """Its files."""
        return SyncFiles(self._background, self._sandbox.files)

    @property
    def guarantees(self) -> Guarantees:
        """What it keeps, as probed."""
        return self._sandbox.guarantees

    def info(self) -> Info:
        """What is known of it."""
        return self._sandbox.info()

    def exec(self, command: Sequence[str] | str, *, timeout: float, stdin: str = "") -> ExecResult:
        """Run a program, or a line of shell, in the working folder."""
        return self._background.run(self._sandbox.exec(command, timeout=timeout, stdin=stdin))

    def run_code(self, code: str, *, timeout: float) -> ExecResult:
        """Run Python in the persistent interpreter."""
        return self._background.run(self._sandbox.run_code(code, timeout=timeout))

    def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        """Run one SQL statement on the sandbox's database."""
        return self._background.run(self._sandbox.sql(query, timeout=timeout, parameters=parameters))

    def snapshot(self) -> SyncSnapshot:
        """Files and database now."""
        made = self._background.run(self._sandbox.snapshot(), _dropped)
        return SyncSnapshot(self._background, made)

    def restore(self, snapshot: SyncSnapshot) -> None:
        """Take files and database back to `snapshot`."""
        self._background.run(self._sandbox.restore(snapshot._snapshot))

    def fork(self, count: int = 1, *, live: bool = False) -> list[SyncSandbox]:
        """`count` more with the same files and database; with `live` also with the variables."""
        made = self._background.run(self._sandbox.fork(count, live=live), _all_killed)
        return [SyncSandbox(self._background, each) for each in made]

    def pause(self) -> None:
        """Stop its processes where they are."""
        self._background.run(self._sandbox.pause())

    def resume(self) -> None:
        """Let them go on."""
        self._background.run(self._sandbox.resume())

    def set_timeout(self, seconds: float | None) -> None:
        """Kill it so many wall seconds from now; None is never."""
        self._background.run(self._sandbox.set_timeout(seconds))

    def kill(self) -> None:
        """End it; idempotent, also when everything was closed. Ctrl-C is raised when it has ended."""
        with contextlib.suppress(SandboxLost):
            self._background.finish(self._sandbox.kill())


async def _killed(sandbox: Sandbox) -> None:
    await sandbox.kill()


async def _all_killed(sandboxes: Sequence[Sandbox]) -> None:
    await asyncio.gather(*(each.kill() for each in sandboxes))


async def _dropped(snapshot: Snapshot) -> None:
    await snapshot.drop()


class SyncSandboxes(contextlib.AbstractContextManager["SyncSandboxes"]):
    """A `SandboxProvider` that was not started yet; it is started on entry and closed at the end:

        with SyncSandboxes(provider) as sandboxes, sandboxes.create(owner="me") as sandbox:
            sandbox.exec("ls", timeout=5).stdout

    In a notebook, call `start` and `close`.
    """

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._background = Background()
        self._closing = threading.Lock()
        self._open = False

    def start(self) -> Self:
        """Probe the guarantees and warm up; idempotent until `close`. Raises as `SandboxProvider.start`."""
        if not self._open:
            self._background.start()
            self._open = True
            atexit.register(self._at_exit)
            try:
                self._background.run(self._provider.start())
            except BaseException:  # boundary: nothing stays behind; raised on
                self.close()
                raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def guarantees(self) -> Guarantees:
        """As probed by `start`."""
        return self._provider.guarantees

    @property
    def capacity(self) -> int:
        """Sandboxes that may be alive at once."""
        return self._provider.capacity

    @property
    def live(self) -> int:
        """Sandboxes that are not killed."""
        return self._provider.live

    def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: SyncSnapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> SyncSandbox:
        """A fresh sandbox; arguments and errors are those of `SandboxProvider.create`."""
        making = self._provider.create(
            environment,
            owner=owner,
            limits=limits,
            snapshot=None if snapshot is None else snapshot._snapshot,
            network=network,
            require=require,
        )
        return SyncSandbox(self._background, self._background.run(making, _killed))

    def connect(self, id: str) -> SyncSandbox:
        """The live sandbox of that id. Raises `SandboxLost` where there is none."""
        return SyncSandbox(self._background, self._background.run(self._provider.connect(id)))

    def load(self, path: Path) -> SyncSnapshot:
        """A snapshot that was saved. Raises `SandboxError` where its content is not what its name says."""
        return SyncSnapshot(self._background, self._background.run(self._provider.load(path), _dropped))

    def close(self) -> None:
        """Kill every sandbox and end the provider and the thread; idempotent. Calls under way raise
        `SandboxLost`. The first Ctrl-C is raised when all is gone, a second one at once: close again."""
        with self._closing:
            if not self._open or not self._background.here:
                return
            try:
                self._background.finish(self._provider.close())
            finally:
                if self._provider.live == 0:
                    self._background.stop()
                    self._open = False
                    atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread starts any more: the reaper does the rest
            self.close()
