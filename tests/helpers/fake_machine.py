"""Machines of a vendor that does not exist: folders, and processes that start in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rollwright.sandbox.files import remove_tree


class FakeMachine:
    """Runs commands on this host, below `folder`."""

    def __init__(self, id: str, root: Path, labels: dict[str, str]) -> None:
        self.id, self.labels = id, labels
        self.folder = root / id
        self.folder.mkdir()
        self.seconds = 0.0
        """The lifetime asked for last."""
        self.paused = False

    async def stream(self, argv: list[str]) -> AsyncIterator[tuple[str, bytes | int]]:
        """Pieces of "stdout" as they come, then its "exit"; who stops listening ends the process."""
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "VENDOR_SECRET": "x"}
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            while piece := await process.stdout.read(2**16):
                yield "stdout", piece
            yield "exit", await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # else asyncio keeps the pipe open

    async def run(self, argv: list[str]) -> tuple[bytes, int]:
        """Standard output and exit code."""
        out, code = bytearray(), 0
        async for _, piece in self.stream(argv):
            if isinstance(piece, int):
                code = piece
            else:
                out += piece
        return bytes(out), code

    def processes(self) -> list[int]:
        """Those whose folder is in this machine."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/cwd").startswith(str(self.folder)):
                    stat = Path(f"/proc/{name}/stat").read_text()
                    if stat.rpartition(")")[2].split()[0] not in "ZX":
                        found.append(int(name))
        return found

    def kill(self) -> None:
        """End all that is in it."""
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        remove_tree(self.folder)

    def copy(self, id: str) -> FakeMachine:
        """Another with the same files; a vendor that forks would copy its memory too."""
        made = FakeMachine(id, self.folder.parent, dict(self.labels))
        shutil.copytree(
            self.folder,
            made.folder,
            dirs_exist_ok=True,
            symlinks=True,
            ignore=lambda folder, names: [n for n in names if n == "socket"],
        )
        return made
