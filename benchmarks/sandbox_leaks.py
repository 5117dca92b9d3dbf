"""1,000 sandboxes' lives, a third of them ended by kill −9 of their owner; then the reaper: what is left?

Owners are processes that make sandboxes, run Python and programs in them, leave daemons, snapshot and fork;
each is killed at a random moment while it holds some (seeded). This process is an owner too, one that stays.
It adopts what the killed ones leave (it is a subreaper), so that what it counts is all of it and nothing of
others'. Cases: `left/processes`, `left/mounts`, `left/cgroups`, `left/directories`, `left/records` (in the
registry), `left/descriptors` (of this process); and for judging them `cycles`, `killed` (those of a killed
owner), `owners`, and `before-the-reaper/processes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from backends import BACKENDS, started
from harness import Cases, parser
from sandbox_owner import lives
from turns import CLOCK, descendants

from rollwright.sandbox import owners
from rollwright.sandbox.registry import SUFFIX

HELD = 10
"""Lives at once in an owner."""
GRACE_SECONDS = 10.0
"""How long what was killed may take to be gone."""
_OWNER_SECONDS = 120.0
_SUBREAPER = 36  # prctl(PR_SET_CHILD_SUBREAPER)


@dataclass
class Counted:
    """What happened, and what the providers were called."""

    cycles: int = 0
    killed: int = 0
    owners: int = 0
    ids: set[str] = field(default_factory=set)
    roots: list[Path] = field(default_factory=list)


def records(registry: Path) -> set[str]:
    """Providers that are written down."""
    return {path.stem for path in registry.rglob(f"*{SUFFIX}")}


def mounts() -> set[bytes]:
    """Every mount this process sees."""
    return set(Path("/proc/self/mountinfo").read_bytes().splitlines())


def descriptors() -> int:
    """Descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def living() -> list[int]:
    """Descendants that run; those that ended are waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    return descendants()


def cgroups(ids: set[str]) -> list[str]:
    """Cgroups of the providers of those names, below every controller."""
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in names if any(each in name for each in ids)]
    return found


def owned(backend: str, root: Path, registry: Path, rng: random.Random, counted: Counted) -> None:
    """Let an owner live until a random moment; kill it."""
    script = Path(__file__).parent / "sandbox_owner.py"
    command = [sys.executable, str(script), backend, str(root), str(rng.random()), str(HELD)]
    begun = ended = 0
    last, began = rng.randint(HELD + 2, 4 * HELD - 2), CLOCK.now()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        for line in owner.stdout:
            begun += line == "begun\n"
            ended += line == "ended\n"
            if begun >= last or CLOCK.now() - began > _OWNER_SECONDS:
                break
        counted.ids |= records(registry)
        CLOCK.pause(rng.uniform(0.0, 0.03))
        owner.kill()
        rest = owner.stdout.read().splitlines()
    begun, ended = begun + rest.count("begun"), ended + rest.count("ended")
    if begun < last:
        raise SystemExit(f"an owner ended by itself after {begun} sandboxes")
    counted.cycles += begun
    counted.killed += begun - ended
    counted.owners += 1
    counted.roots.append(root)


async def stays(backend: str, root: Path, registry: Path, count: int, counted: Counted) -> int:
    """Be an owner that closes; descriptors of this process that are left of it."""
    rng = random.Random(0)
    async with started(backend, root / "first") as provider:
        await lives(provider, rng, 2, str, 4)  # what is opened once and kept is opened now
    before = descriptors()
    async with started(backend, root / "second") as provider:
        counted.ids |= records(registry)
        await lives(provider, rng, HELD, str, count)
    counted.cycles += count
    counted.roots += [root / "first", root / "second"]
    return descriptors() - before


def settled(cases: Cases, before: set[bytes], counted: Counted, registry: Path) -> None:
    """Reap, and count what is left."""
    CLOCK.pause(0.5)
    cases.add("before-the-reaper/processes", len(living()), unit="processes")
    owners.reap_all(clock=CLOCK)
    for root in counted.roots:
        owners.reap(root)
    deadline = CLOCK.now() + GRACE_SECONDS
    while living() and CLOCK.now() < deadline:
        CLOCK.pause(0.05)
    left = {
        "processes": [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in living()],
        "mounts": sorted(mounts() - before),
        "cgroups": cgroups(counted.ids),
        "directories": [path for root in counted.roots for path in root.glob("*") if path.is_dir()],
        "records": sorted(records(registry)),
    }
    for name, found in left.items():
        for each in found:
            print(f"left, {name}: {each!s:.200}", file=sys.stderr)
        cases.add(f"left/{name}", len(found), unit=name)


def main() -> None:
    """Make, kill, reap, count."""
    flags = parser("sandboxes whose owners are killed, the reaper, and what is left")
    flags.add_argument("--backend", default="native", choices=BACKENDS)
    flags.add_argument("--seed", type=int, default=0)
    chosen = flags.parse_args()
    count, rng, counted = (60 if chosen.quick else 1000), random.Random(chosen.seed), Counted()
    cases = Cases("sandbox-leaks")
    if ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("this process cannot adopt what killed owners leave")
    before = mounts()
    with tempfile.TemporaryDirectory() as folder:
        place, registry = Path(folder), Path(folder) / "registry"
        registry.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(registry)  # a registry of this run's own
        open_after = asyncio.run(stays(chosen.backend, place / "stays", registry, count // 5, counted))
        while counted.cycles < count or 3 * counted.killed < count:
            root = place / f"owner{counted.owners}"
            owned(chosen.backend, root, registry, rng, counted)
            print(f"{counted.cycles} cycles, {counted.killed} killed", file=sys.stderr, flush=True)
        settled(cases, before, counted, registry)
    cases.add("left/descriptors", open_after, unit="descriptors")
    for case in ("cycles", "killed", "owners"):
        cases.add(case, getattr(counted, case), unit={"owners": "processes"}.get(case, "sandboxes"))
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
