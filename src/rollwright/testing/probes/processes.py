"""Attempts at processes outside, and at outliving the sandbox.

Role: probes of the guarantee `kill`, and of `kernel_surface` where signals and tracing are the way out.
Neighbours: `bait` has the process to attack and finds those that stayed. Invariant: a signal to everybody is
only sent for good after a harmless one was seen not to arrive.
"""

from __future__ import annotations

import asyncio
import secrets

from rollwright.sandbox.base import Sandbox, SandboxProvider
from rollwright.testing.probes import bait
from rollwright.testing.probes.base import TIGHT, Observation, agent, attacked, probe, ran, serves

_APPEAR_SECONDS = 2.0
"""How long a process may take to show up on the host."""

_STAY = """
def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _libc.prctl(1, 0, 0, 0, 0)  # no signal when the parent ends
    if session:
        attempt(os.setsid)
    if os.fork() == 0:
        if os.fork() == 0:
            os.execvp('sleep', ['sleep', mark])
        os._exit(0)
    return 0
inside(stay)
"""


async def _stayed(provider: SandboxProvider, code: str, mark: str, rounds: int = 20) -> Observation:
    """Whether a process named `mark` that the code starts is there after `kill`."""
    sandbox = await provider.create(owner="abuse", limits=TIGHT)
    try:
        await ran(sandbox, code)
        seen = await _appears(sandbox, mark)
    finally:
        await sandbox.kill()
    left: list[int] = []
    for _ in range(rounds):  # a process that hops from one number to the next is easily overlooked
        left += bait.marked(mark)
        if left or rounds == 1:
            break
        await asyncio.sleep(0)
    detail = f"left: {left}" if seen else "the host cannot see the sandbox's processes"
    return Observation("kill", not left, detail)


async def _appears(sandbox: Sandbox, mark: str) -> bool:
    """Whether the host sees it."""
    try:
        async with asyncio.timeout(_APPEAR_SECONDS):
            while not bait.marked(mark):
                assert not await serves(sandbox)
    except TimeoutError:
        return False
    return True


def _mark() -> str:
    """Seconds to sleep that nobody else sleeps."""
    return f"600.{secrets.randbelow(10**9):09}"


@probe
async def daemon(provider: SandboxProvider) -> Observation:
    """A process whose parents have ended."""
    mark = _mark()
    code = agent(_STAY, mark=mark, session=False)
    return await _stayed(provider, code, mark, rounds=1)


@probe
async def daemon_of_its_own_session(provider: SandboxProvider) -> Observation:
    """The same, deaf to SIGTERM and SIGHUP, without a death signal, in a session of its own."""
    mark = _mark()
    code = agent(_STAY, mark=mark, session=True)
    return await _stayed(provider, code, mark, rounds=1)


_HOP = """
if os.fork() == 0:
    attempt(os.setsid)
    _libc.prctl(15, mark.encode(), 0, 0, 0)
    end = time.monotonic() + 3
    os.fork()
    while time.monotonic() < end:
        time.sleep(0.005)
        try:
            if os.fork():
                os._exit(0)
            attempt(os.setsid)
        except OSError:
            pass
    os._exit(0)
"""


@probe
async def daemon_that_hops(provider: SandboxProvider) -> Observation:
    """Two chains of processes that each fork the next one and end, faster than they can be listed."""
    mark = f"hop{secrets.token_hex(5)}"
    return await _stayed(provider, agent(_HOP, mark=mark), mark)


_SIGNALS = """
def tell(number):
    os.kill(pid, number)
def by_descriptor():
    signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGUSR2)
attempt(lambda: tell(signal.SIGUSR1))
attempt(by_descriptor)
attempt(lambda: call(234, pid, pid, int(signal.SIGUSR1)))
attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 5))
import resource
attempt(lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)))
attempt(lambda: tell(signal.SIGSTOP))
attempt(lambda: tell(signal.SIGKILL))
"""


@probe
async def signals_to_a_process_of_the_host(provider: SandboxProvider) -> Observation:
    """Signals, limits and priority of a process outside."""
    async with attacked(provider) as sandbox:
        with bait.sleeper() as process:
            await ran(sandbox, agent(_SIGNALS, pid=process.pid))
            done = process.attacked()
    return Observation("kernel_surface", not done, f"the process: {done or 'untouched'}")


_TRACE = """
read, write = os.pipe()
if os.fork() == 0:
    signal.alarm(15)
    attempt(lambda: _libc.ptrace(0x4206, pid, 0, 0))
    os.write(write, b'!')
    time.sleep(600)
os.read(read, 1)
attempt(lambda: open(f'/proc/{pid}/mem', 'rb').close() or open(f'/proc/{pid}/comm').read())
"""


@probe
async def tracing_a_process_of_the_host(provider: SandboxProvider) -> Observation:
    """ptrace and the memory of a process outside."""
    with bait.sleeper() as process:  # ends last: while it is traced it cannot be waited for
        async with attacked(provider) as sandbox:
            told = await ran(sandbox, agent(_TRACE, pid=process.pid))
            done = process.attacked()
    stopped = not done and "sleep" not in told
    return Observation("kernel_surface", stopped, f"the process: {done or 'untouched'}; memory: {told}")


_MEMORY = """
def memory(number):
    os.close(os.open(f'/proc/{number}/mem', os.O_RDWR))
    return 'opened'
[attempt(lambda: memory(number)) for number in (1, os.getppid())]
"""


@probe
async def memory_of_pid_1(provider: SandboxProvider) -> Observation:
    """/proc/1/mem and that of the interpreter's parent, opened for writing, not written."""
    async with attacked(provider) as sandbox:
        told = await ran(sandbox, agent(_MEMORY))
    return Observation("kernel_surface", "opened" not in told, told)


@probe
async def signals_to_everybody(provider: SandboxProvider) -> Observation:
    """kill −1, to stop, then to end all; and SIGSTOP of pid 1 and the parent: the host isn't reached, the
    sandbox serves on."""
    async with attacked(provider) as sandbox:
        with bait.sleeper() as process:
            for group in (-1, 0):
                harmless = agent(f"attempt(lambda: os.kill({group}, signal.SIGURG))")
                await sandbox.run_code(harmless, timeout=5.0)
            if done := process.attacked():
                return Observation("kernel_surface", False, f"a process outside: {done}")
            trouble = []
            for code in (
                "attempt(lambda: os.kill(1, signal.SIGSTOP))",
                "attempt(lambda: os.kill(os.getppid(), signal.SIGSTOP))",
                "attempt(lambda: os.kill(-1, signal.SIGSTOP))",
                "attempt(lambda: os.kill(-1, signal.SIGKILL))",
                "attempt(lambda: os.kill(0, signal.SIGKILL))",
            ):
                await sandbox.run_code(agent(code), timeout=2.0)
                query = await sandbox.sql("SELECT 7", timeout=2.0)
                if why := await serves(sandbox):
                    trouble.append(f"{code}: {why} ({query.status.value})")
            trouble += process.attacked()
    return Observation("kernel_surface", not trouble, "; ".join(trouble))


@probe
async def interpreter_of_another_sandbox(provider: SandboxProvider) -> Observation:
    """SIGKILL to the interpreter of a sandbox beside it."""
    async with attacked(provider) as victim, attacked(provider) as sandbox:
        pid = int(await ran(victim, "import os\nkept = 'kept'\nos.getpid()"))
        await sandbox.run_code(agent("attempt(lambda: os.kill(pid, signal.SIGKILL))", pid=pid), timeout=5.0)
        result = await victim.run_code("kept", timeout=5.0)
    return Observation("kernel_surface", result.value == "'kept'", f"its variables: {result.value}")
