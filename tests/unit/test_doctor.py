"""`rollwright doctor` on this machine, and on one without torch and without isolation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import load
from rollwright.errors import ConfigError
from rollwright.plugins import PartConfig
from rollwright.run import capacity, machine
from rollwright.run.derived import derive
from rollwright.run.doctor import (
    KEEPS,
    UNSAFE,
    _look,
    _part,
    candidates,
    isolation,
    judged,
    leftovers,
    optional,
    told,
)
from rollwright.run.finding import State
from rollwright.run.preflight import taskset
from rollwright.sandbox.base import Guarantee, Guarantees
from rollwright.sandbox.confine import landlock_abi

RUN = "import sys\nfrom rollwright.cli.main import app\napp(sys.argv[1:])\n"
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
NO_WALLS = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
allow, missing, refused = (0x06, 0x7FFF0000, 0, 0), (0x06, 0x50000 | 38, 0, 0), (0x06, 0x50000 | 1, 0, 0)
rules = [
    (0x20, 0, 0, 0), (0x15, 444, 6, 0), (0x15, 272, 6, 0), (0x15, 435, 4, 0), (0x15, 56, 0, 2),
    (0x20, 16, 0, 0), (0x45, 0x7E020000, 2, 0), allow, missing, refused,
]
code = b"".join(struct.pack("HBBI", op, true, false, k) for op, k, true, false in rules)
held = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(held)))
zero = ctypes.c_ulong(0)
assert libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
assert libc.prctl(22, ctypes.c_ulong(2), program, zero, zero) == 0
"""
"""The kernel itself answers that it has no landlock_create_ruleset, and gives no namespaces."""


def doctor(folder: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    return subprocess.run(
        [sys.executable, "-c", before + RUN, "doctor", *arguments],
        cwd=folder,
        env={**environment, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_this_machine_is_told_whole_and_nothing_is_left(tmp_path: Path) -> None:
    ended = doctor(tmp_path)
    lines = ended.stdout.splitlines()
    assert {f"sandbox: {name}:" in ended.stdout for name in KEEPS} == {True}, ended.stderr
    assert not re.search(r"(\w+): \1:", ended.stdout), "a label stands once"
    for config in candidates():
        assert f"sandbox: {config.type}: " in ended.stdout
    ready = "sandbox: auto: takes the backend" in ended.stdout
    assert ready or landlock_abi() == 0
    assert (ended.returncode == 0) == ready == ("training can start here" in lines)
    assert "torch: 2." in ended.stdout and "extras: torch: safetensors" in ended.stdout
    assert "parts: engine embedded: usable" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp")
def test_without_torch_and_isolation_it_says_so_and_how_to_get_them(tmp_path: Path) -> None:
    ended = doctor(tmp_path, "--json", before=NO_TORCH + NO_WALLS)
    assert ended.returncode == 1 and ended.stderr == ""
    told: dict[str, Any] = json.loads(ended.stdout)
    reasons = "\n".join(told["reasons"])
    assert told["ready"] is False
    assert "torch: not installed; pip install 'rollwright[torch]'" in reasons
    assert "sandbox: fs" in reasons and "Landlock" in reasons and "--unsafe-sandbox" in reasons
    found = {(section, each["name"]): each for section, all in told["sections"].items() for each in all}
    assert found["parts", "engine embedded"]["state"] == "bad"
    assert found["parts", "tasks records"]["state"] == "ok"
    # not required, so no reasons
    assert found["sandbox", "memory"]["state"] == "limited"
    assert found["sandbox", "kernel_surface"]["state"] == "absent"
    assert "sandbox: memory" not in reasons and "sandbox: kernel_surface" not in reasons


def test_auto_is_said_to_take_only_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Guarantees(**dict.fromkeys(KEEPS, Guarantee.ENFORCED))

    async def tried(config: PartConfig, root: Path) -> Guarantees | str:
        return kept if root.name in ("bubblewrap", "landlock") else "not here"

    monkeypatch.setattr("rollwright.run.doctor._tried", tried)
    found = {each.name: each.value for each in isolation()}
    assert found["auto"] == "takes the backend 'landlock'" and "enforces" in found["bubblewrap"]


@pytest.mark.parametrize("name", KEEPS)
def test_each_guarantee_that_is_not_kept_says_how_to_get_it(name: str) -> None:
    assert judged(name, "x", Guarantee.ENFORCED).state is State.OK
    for guarantee in (Guarantee.BEST_EFFORT, Guarantee.ABSENT):
        found = judged(name, "x", guarantee)
        assert found.mend and found.state is not State.OK
        assert (found.state is State.BAD) == (name in ("fs", "net", "kill")) == (UNSAFE in found.mend)


def test_guarantees_are_told_in_one_line() -> None:
    kept = Guarantees(
        fs=Guarantee.ENFORCED,
        net=Guarantee.ENFORCED,
        pids=Guarantee.ABSENT,
        memory=Guarantee.BEST_EFFORT,
        disk=Guarantee.BEST_EFFORT,
        kill=Guarantee.ENFORCED,
    )
    assert told(kept) == "enforces fs, net, kill; best effort memory, disk; keeps no pids, kernel_surface"


def test_a_backend_that_fails_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(PartConfig):
        type: str = "broken"

        def build(self, root: Path) -> Any:
            raise OSError("no such\nthing")

    monkeypatch.setattr("rollwright.run.doctor.candidates", lambda: [Broken()])
    found = {each.name: each for each in isolation()}
    assert found["fs"].state is State.BAD and found["memory"].state is State.ABSENT
    assert found["broken"].value == "not usable: OSError: no such thing"


def test_reap_removes_what_a_killed_run_left_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    root = tmp_path / "one" / "sandboxes" / "agents"
    (root / "s" / "work").mkdir(parents=True)
    (root / "empty").mkdir()
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rollwright.sandbox.owners import Registry, record\n"
        "root = Path(sys.argv[1])\nrecord(root / 's', 'r', 0.0)\n"
        "made = root.parent / 'other'\n"
        "entry = Registry().enter(backend='native', root=made, label='run one')\n"
        "entry.sandbox('t', 'r')\n(made / 't' / 'work').mkdir(parents=True)\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(root)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert (tmp_path / f"rollwright-{os.geteuid()}").is_dir()
    said = doctor(tmp_path, "--reap", "--folder", str(tmp_path)).stdout
    assert "✓ leftovers: removed: 2 folders\n" in said and "✓ leftovers: owner: run one\n" in said
    assert [path.name for path in root.iterdir()] == ["empty"]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert [each.value for each in leftovers(tmp_path)] == ["nothing was left"]


def test_a_part_that_cannot_be_used_says_why() -> None:
    found = _part("tasks", "rollwright.tasks", "nowhere:Tasks", needed=False)
    assert found.state is State.ABSENT and "no module 'nowhere'" in found.value
    assert _part("tasks", "rollwright.tasks", "no_such", needed=True).state is State.BAD


def test_a_section_that_fails_is_a_finding() -> None:
    def broken() -> Any:
        yield from ()
        raise OSError("no /proc\nhere")

    (found,) = _look("memory", broken)
    assert found.state is State.BAD and found.value.endswith("(OSError: no /proc here)")


def test_a_folder_without_room_or_that_cannot_be_written(tmp_path: Path) -> None:
    config = load([], ["model.layers=100000", "model.dim=8192"])
    (found,) = machine.disk(tmp_path, derive(config, taskset(config)))
    assert found.state is State.BAD and "PB" in found.value and found.mend
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        list(machine.disk(tmp_path / "file", derive(load([]), taskset(load([])))))


def test_the_limits_of_a_container_count(tmp_path: Path) -> None:
    free = capacity.memory(tmp_path)
    assert free is not None and 0 < free[1] <= free[0]
    assert capacity.cores(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("524288\n")
    assert capacity.cores(tmp_path) == 0.5
    assert capacity.memory(tmp_path) == (1048576, 524288)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity.cores(tmp_path) == len(os.sched_getaffinity(0))


def test_extras_are_read_from_the_metadata() -> None:
    lines = [
        "numpy<3",
        "torch<3,>=2.13; extra == 'torch'",
        'a-b>=1 ; python_version < "4" and extra == "x-y"',
    ]
    assert optional(lines) == {"torch": ["torch"], "x-y": ["a-b"]}


def test_the_probe_of_a_missing_landlock_is_real() -> None:
    probe = NO_WALLS + "from rollwright.sandbox.confine import landlock_abi\nassert landlock_abi() == 0\n"
    subprocess.run([sys.executable, "-c", probe], timeout=60, check=True, cwd=tempfile.gettempdir())
