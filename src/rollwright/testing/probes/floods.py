"""More output than anyone asked for, and ways to keep a call from ending.

Role: probes that every backend stops, whatever it declares. Neighbours: `base`. Invariant: after each the
sandbox serves on, and the host has got no more than the limit says.
"""

from __future__ import annotations

from rollwright.sandbox.base import SandboxProvider
from rollwright.testing.probes.base import SECONDS, TIGHT, Observation, agent, attacked, probe, serves, short
from rollwright.types import CallStatus, ExecResult

_ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT printf('%1000d', i) FROM r"


def _said(result: ExecResult) -> int:
    """Characters that came to the host."""
    rows = result.rows.rows if result.rows is not None else ()
    cells = sum(len(cell) for row in rows for cell in row if isinstance(cell, str))
    return max(len(result.stdout), len(result.stderr), len(result.value or ""), cells)


@probe
async def endless_output(provider: SandboxProvider) -> Observation:
    """From Python, from its descriptors, as a value, from a program, from SQL."""
    descriptor = "while True: os.write({number}, b'x' * 65536)"
    codes = {
        "printed": "while True: print('x' * 1000)",
        "complained": "while True: print('x' * 1000, file=sys.stderr)",
        "raised": "raise ValueError('x' * 10**6)",
        "valued": "'x' * 10**6",
        "one line": "print('x' * 10**7)",
    }
    trouble = []
    async with attacked(provider) as sandbox:
        for name, code in codes.items():
            result = await sandbox.run_code(agent(code), timeout=SECONDS)
            if _said(result) > TIGHT.output_bytes or result.status is CallStatus.OK:
                trouble.append(f"{name}: {short(result)[:80]} ({_said(result)})")
        for number in (1, 2):
            result = await sandbox.run_code(agent(descriptor.format(number=number)), timeout=0.3)
            trouble += [f"descriptor {number}: {_said(result)}"] * (_said(result) > TIGHT.output_bytes)
        for command in (["yes"], ["sh", "-c", "yes >&2"], ["sh", "-c", "yes & yes"]):
            result = await sandbox.exec(command, timeout=SECONDS)
            if _said(result) > TIGHT.output_bytes or result.status is not CallStatus.OUTPUT:
                trouble.append(f"{' '.join(command)}: {result.status.value} ({_said(result)})")
        result = await sandbox.sql(_ENDLESS, timeout=SECONDS)
        if _said(result) > 4 * TIGHT.output_bytes or result.status is not CallStatus.OUTPUT:
            trouble.append(f"SQL: {result.status.value} ({_said(result)})")
        trouble += filter(None, [await serves(sandbox)])
    return Observation("always", not trouble, "; ".join(trouble))


@probe
async def output_held_open(provider: SandboxProvider) -> Observation:
    """A program that ends while its child keeps its output, and one that closes it and stays."""
    trouble = []
    async with attacked(provider) as sandbox:
        held = await sandbox.exec(["sh", "-c", "sleep 600 & echo done"], timeout=SECONDS)
        if held.status is not CallStatus.OK or held.stdout != "done\n":
            trouble.append(f"held open: {short(held)}")
        closed = await sandbox.exec(["sh", "-c", "exec >&- 2>&-; sleep 600"], timeout=0.3)
        trouble += [f"closed: {short(closed)}"] * (closed.status is not CallStatus.TIMEOUT)
        deaf = await sandbox.exec(["sh", "-c", "trap '' TERM INT; sleep 600; sleep 600"], timeout=0.3)
        trouble += [f"deaf: {short(deaf)}"] * (deaf.status is not CallStatus.TIMEOUT)
        trouble += filter(None, [await serves(sandbox)])
    return Observation("always", not trouble, "; ".join(trouble))


_STUCK = (
    "while True: pass",
    "import time\ntime.sleep(600)",
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "9 ** 9 ** 9",
)


@probe
async def code_that_does_not_end(provider: SandboxProvider) -> Observation:
    """Loops, blocked signals, handlers that catch everything, a stopped interpreter."""
    trouble = []
    async with attacked(provider) as sandbox:
        for code in _STUCK:
            result = await sandbox.run_code(code, timeout=0.2)
            if result.status not in (CallStatus.TIMEOUT, CallStatus.ERROR, CallStatus.LOST):
                trouble.append(f"{code.splitlines()[-1]}: {short(result)}")
        trouble += filter(None, [await serves(sandbox)])
    return Observation("always", not trouble, "; ".join(trouble))


@probe
async def a_tampered_interpreter(provider: SandboxProvider) -> Observation:
    """Ends itself, writes to the line to the host, closes all that is open: no rollout is lost by it."""
    codes = (
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "os.write(3, b'x' * 99)",
        "os.closerange(0, 1024)",
        "[os.write(n, struct.pack('!I', 2**32 - 1)) for n in range(3, 10) if attempt(lambda: os.fstat(n))]",
        "sys.settrace(lambda *a: 1 / 0)",
        "import builtins\nfor name in dir(builtins):\n    delattr(builtins, name)",
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
        "import gc\n[each.clear() for each in gc.get_objects() if type(each) is dict]",
    )
    trouble = []
    async with attacked(provider) as sandbox:
        for code in codes:
            await sandbox.run_code(agent(code), timeout=2.0)
            for _ in range(2):  # the first call may find it gone
                why = await serves(sandbox)
                if not why:
                    break
            else:
                trouble.append(f"{code.splitlines()[0]}: {why}")
                await sandbox.run_code("import os; os._exit(0)", timeout=2.0)
    return Observation("always", not trouble, "; ".join(trouble))
