"""kill −9 at random moments of an async run, resumed each time: what is lost, trained twice or left behind?

One run of the records example in the processes that a user's run has. At a random moment a random process
of it (conductor, trainer, rollouts, or one of the sandboxes' processes) is killed; what the command leaves
behind is looked for; then `rollwright train --resume` goes on, until the kills are used up and the run may
finish. A run that finishes before is given more steps.

Cases: `lost` (rollouts that were started and have no end in the ledger of the finished run), `twice`
(rollouts in more than one commit, or with more uses than one), `left` (processes of the run that live 15 s
after its command ended), and for judging them: kills by process, rollouts, steps, resumes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness import EXAMPLE, QUICK, Cases, parser

from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import Clock, SystemClock
from rollwright.run.folder import RunFolder

STEPS = ("loop.steps=40", "loop.groups=4", "rollout.concurrency=32", "evaluation.tasks=64")
LEFT_SECONDS = 15.0
MORE = 20
"""Steps that a run gets which finished before the kills were used up."""


@dataclass(frozen=True)
class Process:
    """One process of this machine; `started` tells it from a later one of the same number."""

    pid: int
    started: int


@dataclass
class Counted:
    """What happened on the way."""

    killed: Counter[str] = field(default_factory=Counter)
    left: int = 0
    parts: int = 0


def status(pid: int) -> tuple[int, int, int] | None:
    """(parent, session, start time in ticks) of a living process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[3]), int(fields[19]))


def family(root: int) -> list[Process]:
    """`root` and all its descendants."""
    table = {
        int(name): found for name in os.listdir("/proc") if name.isdecimal() and (found := status(int(name)))
    }
    chosen, size = {root}, 0
    while len(chosen) > size:
        size = len(chosen)
        chosen |= {pid for pid, (parent, _, _) in table.items() if parent in chosen}
    return [Process(pid, table[pid][2]) for pid in sorted(chosen) if pid in table]


def alive(process: Process) -> bool:
    """Whether it still runs."""
    found = status(process.pid)
    return found is not None and found[2] == process.started


def role(process: Process, root: int) -> str:
    """What a process of the run does."""
    if process.pid == root:
        return "conductor"
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    return next((name for name in ("trainer", "rollouts") if name in words), "sandbox")


def interrupted(
    command: list[str], seconds: float, rng: random.Random, counted: Counted, clock: Clock
) -> None:
    """Start `command`, kill one of its processes after `seconds`, and count what it leaves behind."""
    counted.parts += 1
    with tempfile.TemporaryFile() as output:
        started = subprocess.Popen(command, stdout=output, stderr=output)
        clock.pause(seconds)
        processes = family(started.pid)
        kinds = sorted({role(process, started.pid) for process in processes})
        kind = rng.choice(kinds) if kinds else "none"
        victims = [process for process in processes if role(process, started.pid) == kind]
        if victims:
            os.kill(rng.choice(victims).pid, signal.SIGKILL)
            counted.killed[kind] += 1
        if kind == "sandbox":  # the run goes on without it: stop it as Ctrl-C does, then look
            clock.pause(2.0)
            processes = list({*processes, *family(started.pid)})
            started.send_signal(signal.SIGINT)
        started.wait(120)
        deadline = clock.now() + LEFT_SECONDS
        while (left := [process for process in processes if alive(process)]) and clock.now() < deadline:
            clock.pause(0.2)
        counted.left += len(left)
        for process in left:
            print(f"left: {role(process, started.pid)} {process}", file=sys.stderr)


def main() -> None:
    """Kill, resume, count."""
    flags = parser("kill −9 at random moments, resumed each time")
    flags.add_argument("--kills", type=int, default=30)
    flags.add_argument("--seed", type=int, default=0)
    chosen = flags.parse_args()
    kills, rng, clock = (2 if chosen.quick else chosen.kills), random.Random(chosen.seed), SystemClock()
    cases, counted = Cases("crash"), Counted()
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root) / "crash-1")
        sets = [*QUICK, *STEPS, f"folder={root}", 'name="crash"']
        train = [sys.executable, "-m", "rollwright.cli.main", "train"]
        first = [*train, str(EXAMPLE), *(word for text in sets for word in ("--set", text))]
        again = [*train, "--resume", str(folder.path)]
        while sum(counted.killed.values()) < kills:
            command = again if folder.config.is_file() else first
            if folder.finished.exists():
                command = [*again, "--set", f"loop.steps={folder.load().loop.steps + MORE}"]
            interrupted(command, rng.uniform(1.0, 14.0), rng, counted, clock)
            print(f"{dict(counted.killed)}, left {counted.left}", file=sys.stderr, flush=True)
        ended = subprocess.run(again, capture_output=True, text=True, timeout=900)
        if ended.returncode:
            raise SystemExit(f"the run did not finish: {ended.stderr.strip() or ended.stdout[-500:]}")
        judge(folder, cases, clock)
    for kind, number in sorted(counted.killed.items()):
        cases.add(f"killed/{kind}", number, unit="kills")
    cases.add("parts", counted.parts + 1, unit="starts of the command")
    cases.add("left", counted.left, unit="processes")
    cases.finish(chosen.keep)


def judge(folder: RunFolder, cases: Cases, clock: Clock) -> None:
    """What the ledger of the finished run says."""
    store = SqliteStore(folder.store, 1, clock)
    try:
        counts, started = store.counts(), store.newest(10**9)
        entries = [store.find(identity.rollout) for identity in started]
        trained = Counter(rollout for commit in store.commits() for rollout in commit.trained)
        last = store.last_commit()
    finally:
        store.close()
    ended = [entry for entry in entries if entry is not None and not entry.disposition.open]
    uses = {entry.identity.rollout: entry.uses for entry in ended}
    twice = {r for r, n in trained.items() if n > 1} | {r for r, n in uses.items() if n > 1}
    unsaid = {r for r, n in uses.items() if n} ^ set(trained)  # the ledger and the commits must agree
    cases.add("lost", counts.started - len(ended) + len(unsaid), unit="rollouts")
    cases.add("twice", len(twice), unit="rollouts")
    cases.add("rollouts", counts.started, unit="rollouts")
    cases.add("trained", len(trained), unit="rollouts")
    cases.add("steps", last.version.step if last else 0, unit="optimiser steps")


if __name__ == "__main__":
    main()
