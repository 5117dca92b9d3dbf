"""What an abuse probe is, and what all of them are written with.

Role: the list that `testing.abuse` runs, and the few words that probes share. Neighbours: the modules of
this package add to the list. Invariants: a probe harms nothing where the attempt succeeds (a backend without
walls runs it on the host itself): what is set is set to what it was, what is made is removed, what multiplies
ends by itself; where the host can look, the agent's word is not taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from rollwright.sandbox.base import GuaranteeName, Limits, Sandbox, SandboxProvider
from rollwright.types import CallStatus, ExecResult

SECONDS = 20.0
"""Deadline of an attempt: nothing here takes as long."""

TIGHT = Limits(
    memory_bytes=256 * 2**20,
    file_bytes=8 * 2**20,
    disk_bytes=64 * 2**20,
    files=2_000,
    processes=16,
    output_bytes=2**12,
)
"""What the probes try to exceed."""

Against = GuaranteeName | Literal["always"]
"""The guarantee that stops an attempt; "always" is what no backend may let through, whatever it declares."""


@dataclass(frozen=True)
class Observation:
    """How one attempt ended."""

    guarantee: Against
    stopped: bool
    detail: str = ""
    """What was seen, for the person who reads a failure."""


Probe = Callable[[SandboxProvider], Awaitable[Observation]]
PROBES: list[Probe] = []
"""Each takes a started provider; its name says what is attempted."""


def probe(function: Probe) -> Probe:
    """Add to the list."""
    PROBES.append(function)
    return function


_PRELUDE = """
import ctypes, os, signal, socket, stat, struct, sys, time
_libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        return action()
    except BaseException as error:
        return type(error).__name__
def call(number, *arguments):
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _libc.syscall(ctypes.c_long(number), *arguments)
def inside(action):
    '''What `action` gives (a small number), run in a child: it may give up what the interpreter needs, or be
    killed for what it does.'''
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(int(action()))
        except BaseException:
            os._exit(0)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def agent(body: str, **values: str | int | float | list[int] | list[str]) -> str:
    """Agent code: `body` with `values` as its variables."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return f"{_PRELUDE}{given}{body}"


@contextlib.asynccontextmanager
async def attacked(provider: SandboxProvider, limits: Limits = TIGHT) -> AsyncIterator[Sandbox]:
    """A sandbox for one probe, gone at its end."""
    sandbox = await provider.create(owner="abuse", limits=limits)
    try:
        yield sandbox
    finally:
        await sandbox.kill()


async def ran(sandbox: Sandbox, code: str) -> str:
    """The repr of the last expression of agent code, "" where it has none.

    Raises:
        AssertionError: the code itself failed, so nothing was attempted.
    """
    result = await sandbox.run_code(code, timeout=SECONDS)
    assert result.status is CallStatus.OK, f"the attempt could not be made: {result}"
    return result.value or ""


async def serves(sandbox: Sandbox) -> str:
    """Why a sandbox no longer does its work; "" where it does."""
    python = await sandbox.run_code("40 + 2", timeout=SECONDS)
    if python.value != "42":
        return f"Python no longer runs: {short(python)}"
    query = await sandbox.sql("SELECT 7", timeout=SECONDS)
    if query.status is not CallStatus.OK:
        return f"SQL no longer runs: {short(query)}"
    return ""


def short(result: ExecResult) -> str:
    """A result in a few words."""
    said = (result.stderr or result.stdout).strip().splitlines()
    return f"{result.status.value} {said[-1][:120] if said else ''}".strip()
