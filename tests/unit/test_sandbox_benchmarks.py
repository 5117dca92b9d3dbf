"""The pure parts of the sandbox benchmarks: turns, ratios, what is counted as left."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from backends import bwrap
from harness import Cases
from sandbox import bubblewrapped, proportional, wrapped
from sandbox_leaks import cgroups, records
from sandbox_owner import lives
from turns import REFERENCES, Samples, descendants, rounds

from rollwright.testing.memory_sandboxes import MemorySandboxes


async def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    log: list[str] = []

    async def one() -> float:
        log.append("one")
        return float(len(log))

    async def other() -> float:
        log.append("other")
        return 2.0

    samples = Samples()
    await rounds(samples, {"one": one, "other": other}, 3)
    assert log == ["one", "other"] * 4
    assert samples.found == {"one": [3.0, 5.0, 7.0], "other": [2.0] * 3}


def test_a_case_is_told_in_units_of_its_reference() -> None:
    samples, cases = Samples({"x": [0.001 * n for n in range(1, 101)], "R": [0.01] * 5}), Cases("test")
    samples.add(cases, "x/R", "x", "R")
    (case,) = cases.found
    assert (case.ours, case.theirs) == pytest.approx((50.5, 10.0))
    assert (case.ratio, case.low, case.high) == pytest.approx((5.05, 0.6, 9.6))


async def test_the_references_start_what_they_say() -> None:
    assert await REFERENCES["R"]() > 0 and await REFERENCES["P"]() > 0


def test_descendants_are_the_living_below() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    below = int(child.stdout.readline())
    assert {child.pid, below} <= set(descendants())
    assert proportional() > 0
    os.kill(below, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    zombie = os.posix_spawnp("true", ["true"], {})
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    assert not {child.pid, below, zombie} & set(descendants())
    os.waitpid(zombie, 0)


def test_what_is_written_down_is_found(tmp_path: Path) -> None:
    assert records(tmp_path) == set()
    (tmp_path / "rollwright").mkdir()
    (tmp_path / "rollwright" / "abc.jsonl").touch()
    assert records(tmp_path) == {"abc"}
    assert cgroups(set()) == cgroups({"no such provider"}) == []


class Quiet(random.Random):
    """Chooses no life that starts programs: sandboxes in memory would start them here."""

    def random(self) -> float:
        return 0.99


async def test_lives_end_as_they_are_told_and_leave_nothing() -> None:
    provider, said = MemorySandboxes(), list[str]()
    await lives(provider, Quiet(1), 3, said.append, 12)
    assert said.count("begun") == said.count("ended") == 12
    held = [said[:n].count("begun") - said[:n].count("ended") for n in range(len(said) + 1)]
    assert max(held) == 4  # three, and the one that was just begun
    assert provider.live == 0


@pytest.mark.needs("bubblewrap")
def test_bubblewrap_runs_the_same_work() -> None:
    program = bwrap()
    assert program is not None
    shown = subprocess.run(bubblewrapped(program), capture_output=True, text=True, check=True)
    assert shown.stdout == "1\n"
    assert wrapped(bubblewrapped(program), 2, 4) > 0
