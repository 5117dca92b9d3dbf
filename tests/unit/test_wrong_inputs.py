"""What people get wrong, each given to the real command: one line that names the thing and says what to do.

Every case is a process of its own: exit code other than 0, exactly one line on standard error, no traceback.
Most are forked from one that has the imports behind it, so that they cost what they do, not what Python does.
Left out: a port that is taken (no command opens one yet), and a disk that fills while a run writes
(`tests/unit/buffer/test_sqlite_faults.py` has that for the ledger).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwright.buffer.base import Commit
from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.run.begin import begin

pytestmark = pytest.mark.timeout(120)

RUN = "import sys\nfrom rollwright.cli.main import app\napp(sys.argv[1:])\n"
SERVER = """
import json, os, sys
import rollwright.run.conductor, rollwright.run.evaluation, rollwright.run.preflight, rollwright.sandbox.local
from rollwright.cli.main import app
if sys.argv[1:] == ["torch"]:
    import rollwright.run.parts, rollwright.run.rollout_side, rollwright.trainer.torch_trainer
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(order["folder"])
        sys.path.append(order["folder"])
        for number, name in enumerate((os.devnull, order["out"], order["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        app(order["arguments"])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
TINY = ["model.dim=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn=16", "loop.steps=1"]
TASK = (
    '{"id": "ID", "set": "mine", "messages": [{"role": "user", "content": "ID: 1 + 1?"}], "tools": '
    '["python"], "checks": [{"kind": "answer_equals", "expected": "2"}]}'
)
JSONL = ["tasks.type=jsonl", "tasks.train=train.jsonl", "tasks.heldout=heldout.jsonl", "warmstart.steps=0"]
FILES: dict[str, str | bytes] = {
    "good.toml": "",
    "broken.toml": "[loop\nsteps = 3\n",
    "binary.toml": b"\xff\xfe\x00",
    "section.toml": "[lop]\nsteps = 3\n",
    "near.toml": "[loop]\nstep = 3\n",
    "far.toml": "[warmstart]\nzzz = 3\n",
    "scalar.toml": "loop = 3\n",
    "train.jsonl": f"{TASK.replace('ID', 'a')}\n",
    "heldout.jsonl": f"{TASK.replace('ID', 'b')}\n",
    "bad.jsonl": f'{TASK.replace("ID", "c")}\n{{"id": 3}}\n',
    "empty.jsonl": "\n",
    "raising.py": "raise RuntimeError('of its own')\n",
    "nobuild.py": (
        "from rollwright.plugins import PartConfig\n"
        "class Tasks(PartConfig):\n    type: str = 'nobuild:Tasks'\n"
    ),
}


class Asker:
    """The command, forked from one warm process for each question."""

    def __init__(self, scratch: Path, *modules: str) -> None:
        self._scratch, self._count = scratch, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *modules],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, folder: Path, *arguments: str) -> str:
        """The one line that the command has to say about `arguments`."""
        return the_line(*self.ended(folder, *arguments))

    def ended(self, folder: Path, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        self._count += 1
        out, err = (self._scratch / f"{self._count}.{name}" for name in ("out", "err"))
        order = {"folder": str(folder), "out": str(out), "err": str(err), "arguments": arguments}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return code, out.read_text(), err.read_text()


def the_line(code: int, out: str, err: str) -> str:
    """The one line on standard error of a command that ended with `code`."""
    lines = err.splitlines()
    assert code not in (0, 1) and len(lines) == 1, f"{code}\n{err}{out}"
    assert lines[0].startswith("rollwright: ") and "Traceback" not in out + err
    return lines[0]


def fresh(folder: Path, *arguments: str, before: str = "") -> str:
    """The same from an interpreter of its own, which first does what `before` says."""
    line = [sys.executable, "-c", before + RUN, *arguments]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    return the_line(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    asker = Asker(tmp_path_factory.mktemp("asked"))
    yield asker
    asker.process.communicate()


@pytest.fixture(scope="module")
def ask_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    asker = Asker(tmp_path_factory.mktemp("asked"), "torch")
    yield asker
    asker.process.communicate()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of all kinds, as somebody's working directory."""
    folder = tmp_path_factory.mktemp("desk")
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder.toml").mkdir()
    return folder


CASES: dict[str, tuple[list[str], str]] = {
    "nothing to train": ([], r"give a TOML file"),
    "missing file": (["q"], r"q: no such file; give"),
    "missing file, near name": (["brokn.toml"], r"brokn\.toml: no such file; did you mean broken\.toml"),
    "folder instead of a file": (["folder.toml"], r"folder\.toml: is a folder; give a TOML file"),
    "bad TOML": (["broken.toml"], r"broken\.toml: not TOML: .*line 1.*; mend"),
    "not text": (["binary.toml"], r"binary\.toml: .*not text.*; give a TOML file"),
    "unknown section": (["section.toml"], r"section\.toml: unknown key 'lop'; did you mean 'loop'"),
    "near-miss key": (["near.toml"], r"near\.toml: unknown key 'step' in \[loop\]; did you mean 'steps'"),
    "unknown key": (["far.toml"], r"far\.toml: unknown key 'zzz' in \[warmstart\]; known: batch, schedule"),
    "a value for a section": (["scalar.toml"], r"scalar\.toml: loop: expected a table, got 3"),
    "text for an integer": (
        ["--set", "loop.steps=many"],
        r'loop\.steps: expected an integer ≥ 0, got "many"',
    ),
    "integer in quotes": (["--set", 'loop.steps="3"'], r"loop\.steps: .*write 3 without quotes"),
    "true for an integer": (["--set", "loop.steps=true"], r"loop\.steps: expected an integer ≥ 0, got true"),
    "fraction for an integer": (
        ["--set", "loop.groups=1.5"],
        r"loop\.groups: expected an integer ≥ 1, got 1\.5",
    ),
    "out of bounds": (["--set", "loop.groups=0"], r"loop\.groups: expected an integer ≥ 1, got 0"),
    "no such choice": (["--set", "mode=asinc"], r'mode: expected "coupled" or "async".*did you mean "async"'),
    "--set without =": (["--set", "loop.steps"], r"--set loop\.steps: expected KEY=VALUE, for example"),
    "memory shared": (
        ["--set", "queue.type=memory"],
        r"queue\.type = 'memory'.*use queue\.type = 'sqlite' or mode",
    ),
    "queue too small": (["--set", "queue.capacity=1"], r"queue\.capacity = 1 .*raise queue\.capacity"),
    "two temperatures": (
        ["--set", "rollout.temperature=0.5"],
        r"set rollout\.temperature = trainer\.temperature",
    ),
    "group of one": (
        ["--set", "rollout.group_size=1", "--set", "rollout.min_members=1"],
        r"rollout\.group_size = 1.*give at least 2",
    ),
    "rows too long": (["--set", "model.context=64"], r"model\.context = 64.*raise model\.context or lower"),
    "too few sandboxes": (["--set", "sandbox.max_live=4"], r"128 rollouts at once.*raise sandbox\.max_live"),
    "model that does not divide": (["--set", "model.dim=97"], r"model: dim 97 must divide by heads 4"),
    "no isolation chosen silently": (["--set", "sandbox.type=process"], r"'process'.*--unsafe-sandbox"),
    "unknown part": (["--set", "algorithm.type=gropo"], r"algorithm: no 'gropo'.*did you mean 'grpo'.*Known"),
    "plug-in that is not there": (["--set", "tasks.type=nowhere:Tasks"], r"'nowhere:Tasks'.*PYTHONPATH"),
    "plug-in that fails": (
        ["--set", "tasks.type=raising:Tasks"],
        r"'raising:Tasks'.*RuntimeError: of its own",
    ),
    "plug-in that builds nothing": (
        ["--set", "tasks.type=nobuild:Tasks"],
        r"tasks: Tasks has no method 'build'; give",
    ),
    "missing JSONL file": (
        ["--set", "tasks.train=gone.jsonl"],
        r"gone\.jsonl: cannot be read \(No such file.*; give",
    ),
    "bad JSONL line": (["--set", "tasks.train=bad.jsonl"], r"bad\.jsonl:2: not a task: .*; mend"),
    "empty JSONL file": (
        ["--set", "tasks.train=empty.jsonl"],
        r"empty\.jsonl: holds no task; expected one JSON",
    ),
    "held-out task trained on": (
        ["--set", "tasks.heldout=train.jsonl"],
        r"'a' is in train\.jsonl too.*must be new",
    ),
    "too few held-out tasks": ([], r"1 held-out tasks.*evaluation\.tasks"),
    "no demonstrations": (
        ["--set", "evaluation.tasks=1", "--set", "warmstart.steps=5"],
        r"set warmstart\.steps = 0",
    ),
    "file in the way": (["--set", "folder=good.toml/runs"], r"good\.toml is a file.*--set folder=PATH"),
    "folder that cannot be written": (
        ["--set", "folder=/proc/runs"],
        r"'/proc/runs': cannot write.*--set folder=PATH",
    ),
    "no such space": (["--set", "evaluation.tasks=1000000000"], r"may need .* TB .*free: free space"),
    "no such memory": (
        ["--set", "engine.kv_tokens=10000000000"],
        r"keys and values .*this machine has .*set engine\.kv_tokens = \d+",
    ),
    "no such batch": (["--set", "engine.max_batch=100000000"], r"engine\.max_batch.*65536"),
    "resume and a file": (
        ["good.toml", "--resume", "runs/run-1"],
        r"--resume runs/run-1 .*leave out good\.toml",
    ),
    "resume of nothing": (["--resume", "runs/run-1"], r"runs/run-1 is no run folder.*"),
}
OF_JSONL = {name for name in CASES if "JSONL" in name or "held-out" in name} | {"no demonstrations"}


@pytest.mark.parametrize("case", CASES)
def test_train_says_it_in_one_line(ask: Asker, desk: Path, case: str) -> None:
    arguments, expected = CASES[case]
    if case in OF_JSONL:
        sets = [part for text in JSONL for part in ("--set", text)]
        arguments = ["good.toml", *sets, "--set", "model.context=512", *arguments]
    elif arguments[:1] == ["--set"]:
        arguments = ["good.toml", *arguments]
    before = sorted(desk.iterdir())
    line = ask(desk, "train", *arguments)
    assert re.search(expected, line), line
    assert sorted(each for each in desk.iterdir() if each.name != "__pycache__") == [
        each for each in before if each.name != "__pycache__"
    ], "nothing was begun"


@pytest.mark.parametrize("command", ["config", "train"])
def test_every_command_refuses_the_same_contradiction(ask: Asker, desk: Path, command: str) -> None:
    assert "raise model.context" in ask(desk, command, "good.toml", "--set", "model.context=64")


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_missing_extra_is_named(desk: Path, run: Path, command: str) -> None:
    line = fresh(desk, command, str(run) if command == "eval" else "good.toml", before=NO_TORCH)
    assert "pip install 'rollwright[torch]'" in line


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    line = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("needs mount: no small file system may be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_too_small(ask: Asker, desk: Path, full_disk: Path) -> None:
    line = ask(desk, "train", "good.toml", "--set", f"folder={full_disk}")
    assert re.search(r"may need \d.*1\.0 MB are free: free space", line), line


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one commit, as a stopped run leaves it."""
    from rollwright.run.parts import build
    from rollwright.trainer.torch_trainer import TorchTrainer
    from rollwright.weights.file import FileChannel

    root = tmp_path_factory.mktemp("runs")
    folder = begin(load([], [*TINY, f"folder={root}", "warmstart.steps=1", "evaluation.tasks=1"]))
    parts = build(folder, SystemClock())
    trainer = TorchTrainer(parts.decoder(), parts.config.trainer)
    version = parts.store.lineage().version(0)
    checkpoint = parts.blobs("checkpoints").put(trainer.state())
    parts.store.commit(Commit(version=version, position=0, trained=(), dropped=(), checkpoint=checkpoint))
    FileChannel(parts.blobs("weights"), folder.weights).publish(version, trainer.weights())
    parts.close()
    return folder.path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged, under its own name: the ledger knows it."""
    return shutil.copytree(made, tmp_path / made.name)


def checkpoint_of(run: Path) -> Path:
    (blob,) = (each for each in (run / "blobs" / "checkpoints").glob("??/*") if each.parent.name != "drafts")
    return blob


def damage_checkpoint(run: Path) -> None:
    data = bytearray(checkpoint_of(run).read_bytes())
    data[-5] ^= 1
    checkpoint_of(run).write_bytes(data)


def other_checkpoint(run: Path) -> None:
    """Commit a checkpoint of a schema that comes later."""
    from rollwright.blobs.folder import FolderBlobs
    from rollwright.buffer.sqlite import SqliteStore

    data = checkpoint_of(run).read_bytes().replace(rb"\"schema\": 1", rb"\"schema\": 9")
    digest = FolderBlobs(run / "blobs" / "checkpoints").put(data)
    store = SqliteStore(run / "run.db", 16, SystemClock())
    version = store.lineage().version(1)
    store.commit(Commit(version=version, position=0, trained=(), dropped=(), checkpoint=digest))
    store.close()


def edit_config(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        stored = json.loads((run / "config.json").read_text())
        change(stored)
        (run / "config.json").write_text(json.dumps(stored))

    return edit


def sql(name: str, statement: str) -> Callable[[Path], None]:
    def execute(run: Path) -> None:
        db = sqlite3.connect(run / name, isolation_level=None)
        db.execute(statement)
        db.close()

    return execute


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / name).write_text(text)

    return write


def other_weights(run: Path) -> None:
    text = (run / "weights.json").read_text()
    (run / "weights.json").write_text(text.replace('"schema": 1', '"schema": 9'))


def delete(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "not a run folder": (delete("config.json"), ["eval"], r"is no run folder: config\.json is missing"),
    "config.json of another schema": (
        edit_config(lambda stored: stored.update(schema=9)),
        ["eval"],
        r"config\.json: schema 9, this version reads 1",
    ),
    "config.json cut off": (
        overwrite("config.json", '{"schema": 1, "con'),
        ["eval"],
        r"config\.json: not the conf",
    ),
    "config.json with an unknown key": (
        edit_config(lambda stored: stored["config"].update(lop=3)),  # type: ignore[attr-defined]
        ["eval"],
        r"config\.json: .*lop",
    ),
    "key without effect": (
        lambda run: None,
        ["eval", "--set", "model.dim=64"],
        r"model\.dim: cannot have an.*leave",
    ),
    "checkpoint damaged": (damage_checkpoint, ["eval"], r"checkpoints/.* is damaged.*delete it and restore"),
    "checkpoint gone": (
        lambda run: checkpoint_of(run).unlink(),
        ["eval"],
        r"blob .* is not in .*checkpoints",
    ),
    "checkpoint of another schema": (other_checkpoint, ["eval"], r"schema 9, this version reads 1: update"),
    "checkpoint of another model": (
        edit_config(lambda stored: stored["config"]["model"].update(dim=32)),  # type: ignore[index]
        ["eval"],
        r"of another model.*give the \[model\]",
    ),
    "run.db of another schema": (
        sql("run.db", "UPDATE meta SET version = 9"),
        ["eval"],
        r"run\.db is a store of schema 9.*use the version that wrote it",
    ),
    "run.db damaged": (
        overwrite("run.db", "no database " * 100),
        ["eval"],
        r"run\.db is damaged.*restore it",
    ),
    "run.db gone": (delete("run.db"), ["eval"], r"run\.db is missing"),
    "rollouts.db of another schema": (
        sql("rollouts.db", "UPDATE meta SET version = 9"),
        ["eval"],
        r"rollouts\.db.* schema 9",
    ),
    "tokenizer.json gone": (delete("tokenizer.json"), ["eval"], r"tokenizer\.json"),
    "tokenizer.json damaged": (overwrite("tokenizer.json", "{"), ["eval"], r"tokenizer"),
    "weights.json of another schema": (
        other_weights,
        ["train", "--resume"],
        r"weights\.json has schema 9, expected 1: publish anew",
    ),
    "a change that is too late": (
        lambda run: None,
        ["train", "--set", "model.dim=64", "--resume"],
        r"--set model\.dim=64: .*start a new run",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_run_is_told_in_one_line(ask_torch: Asker, run: Path, tmp_path: Path, case: str) -> None:
    damage, arguments, expected = DAMAGES[case]
    damage(run)
    command = [arguments[0], str(run), *arguments[1:]] if arguments[0] == "eval" else [*arguments, str(run)]
    line = ask_torch(tmp_path, *command)
    assert re.search(expected, line), line


def test_the_undamaged_run_can_be_evaluated(ask_torch: Asker, run: Path) -> None:
    code, out, err = ask_torch.ended(run, "eval", str(run), "--set", "sandbox.unsafe=true")
    assert (code, err) == (0, "") and "sampled" in out


def test_there_are_at_least_25() -> None:
    assert len(CASES) + len(DAMAGES) >= 25
