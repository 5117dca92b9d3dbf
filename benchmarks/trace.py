"""`rollwright trace` in a run of 50,000 rollouts, against `rollwright --help`.

The run folder is made through the real archive, ledger, event log and audit log. Every kind of id is asked
for, upstream and downstream, each as a command of its own, interleaved with `--help`. Case `trace/help`: the
slowest kind's median time over that of `--help`, with the spread over kinds; and each kind on its own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, Cases, parser

from rollwright.clock import Clock, SystemClock
from rollwright.events import EventLog, SpanEnded
from rollwright.guard.audit import AuditLog
from rollwright.run.folder import RunFolder
from rollwright.view.trace import Tracer

sys.path.insert(0, str(ROOT / "tests" / "scenario"))

from made_run import made_run

QUICK, FULL, REPEATS = 2_000, 50_000, 7


def logged(run: RunFolder, clock: Clock) -> None:
    """Audit and spans as the door and the agents write them: three entries and two spans a call."""
    from rollwright.archive.sqlite import opened

    archive = opened(run.rollouts)
    audit, events = AuditLog(run.audit("rollouts"), clock), EventLog(run.events("rollouts"), clock)
    lines = [line.rollout for line in archive.lines()]
    for _, kept, _ in archive.whole(lines):
        rollout = kept.scored.rollout
        for turn in rollout.turns:
            for call in turn.calls:
                audit.append("asked", rollout.identity, call.id, {"tool": call.name, "arguments": "x" * 60})
                audit.append(
                    "decided", rollout.identity, call.id, {"decision": "allow", "rule": "allow-list"}
                )
                audit.append("done", rollout.identity, call.id, {"status": "ok", "content": "x" * 20})
                for name in ("model_turn", "tool.sql"):
                    events.emit(
                        SpanEnded(
                            trace=rollout.identity.trace,
                            name=name,
                            span="0" * 16,
                            parent="1" * 16,
                            seconds=0.1,
                            attributes={"rollout": rollout.identity.rollout, "call": call.id},
                        )
                    )
    audit.close()
    events.close()
    archive.close()


def ids(run: RunFolder) -> dict[str, str]:
    """One id of each kind, of the second optimiser step."""
    with Tracer(run) as tracer:
        middle = "policy@0.2"
        trained = tracer.trace(middle)
        brief = trained.trained[-1]
        whole = tracer.trace(brief.rollout)
    assert whole.rollout is not None and trained.commit is not None
    return {
        "rollout": brief.rollout,
        "call": whole.rollout.turns[0].calls[0].id,
        "sample": whole.rollout.samples[0].id,
        "group": brief.group,
        "task": brief.task,
        "trace": whole.rollout.trace,
        "version": middle,
        "checkpoint": trained.commit.checkpoint,
        "evaluated": "0-before-sampled/1.0",
    }


def timed(command: list[str], clock: Clock) -> float:
    """Wall seconds of a command that must succeed."""
    began = clock.now()
    subprocess.run(command, check=True, capture_output=True)
    return clock.now() - began


def main() -> None:
    """Make the run, then ask."""
    chosen = parser("trace against --help").parse_args()
    cases, clock = Cases("trace"), SystemClock()
    with tempfile.TemporaryDirectory() as root:
        run = made_run(Path(root), QUICK if chosen.quick else FULL)
        logged(run, clock)
        size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
        command = [sys.executable, "-m", "rollwright.cli.main"]
        asked = ids(run)
        floor: list[float] = []
        found: dict[str, list[float]] = {kind: [] for kind in asked}
        for _ in range(3 if chosen.quick else REPEATS):
            for kind, id in asked.items():
                floor.append(timed([*command, "--help"], clock))
                found[kind].append(timed([*command, "trace", id, "--run", str(run.path)], clock))
    helped = statistics.median(floor)
    ratios = {kind: statistics.median(seconds) / helped for kind, seconds in found.items()}
    for kind, ratio in ratios.items():
        cases.add(f"trace/{kind}", ratio * helped, helped, ratio=ratio, unit="× --help")
    worst = max(ratios.values())
    cases.add(
        "trace/help",
        worst * helped,
        helped,
        ratio=worst,
        low=min(ratios.values()),
        high=worst,
        unit="× --help",
    )
    cases.add("size", size / 1e6, unit="MB of run folder")
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
