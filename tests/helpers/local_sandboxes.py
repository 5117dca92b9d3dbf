"""Local backends under test, and their processes as the host sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollwright.sandbox import processes
from rollwright.sandbox.instance import LocalSandbox
from rollwright.sandbox.local import FolderProvider, LandlockProvider
from rollwright.sandbox.native.place import NativePlace
from rollwright.sandbox.native.provider import NativeProvider
from rollwright.sandbox.place import Kind
from rollwright.sandbox.provider import LocalProvider

WALLED = ["landlock", pytest.param("native", marks=pytest.mark.needs("namespaces"))]
"""Backends with walls."""


def built(backend: str, root: Path, **settings: Any) -> LocalProvider:
    """A provider that is not started."""
    kinds: dict[str, type[LocalProvider]] = {"landlock": LandlockProvider, "native": NativeProvider}
    return kinds[backend](root, **settings)


def zygote(provider: LocalProvider) -> int:
    """The process of the host's that its sandboxes come from."""
    if isinstance(provider, NativeProvider):
        return provider._zygotes[False].pid
    assert isinstance(provider, FolderProvider) and provider._zygote is not None
    return provider._zygote.pid


def below(pid: int) -> list[int]:
    """Every living descendant of a process."""
    parents = {}
    for each, _, _ in processes.every():
        with contextlib.suppress(OSError):
            parents[each] = int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1])
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def _numbers(pid: int) -> list[int]:
    """Its numbers, from this pid namespace inwards."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(each) for each in line.split()[1:]]
    return []


def first(provider: LocalProvider, sandbox: LocalSandbox) -> int:
    """Pid 1 of a native sandbox, as the host numbers it."""
    place = sandbox._place
    assert isinstance(place, NativePlace)
    (found,) = [pid for pid in below(zygote(provider)) if _numbers(pid)[1:] == [place._pid, 1]]
    return found


async def worker(provider: LocalProvider, sandbox: LocalSandbox, kind: Kind) -> int:
    """The process of that kind, which has answered before, as the host numbers it."""
    found_worker = sandbox._workers[kind]
    await asyncio.wait([found_worker.forked])  # what its parent says may come after what it says itself
    pid = found_worker.pid()
    assert pid > 0
    if not isinstance(provider, NativeProvider):
        return pid
    (found,) = [each for each in below(first(provider, sandbox)) if _numbers(each)[-1:] == [pid]]
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait; the test's own deadline ends it."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
        await asyncio.sleep(0.002)


async def until_busy(pid: int) -> None:
    """Until the process has used CPU on the call."""

    def ticks() -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])

    before = ticks()
    await until(lambda: ticks() >= before + 2)
