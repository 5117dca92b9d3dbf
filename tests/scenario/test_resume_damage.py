"""What a resume finds changed, missing or damaged is mended where it can be, and refused in one line where it
cannot, before anything is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from small_run import resume, start

from rollwright.archive.sqlite import opened
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.errors import ConfigError, RollwrightError
from rollwright.events import Evaluated, Noted, read_events
from rollwright.run.begin import held, reopen
from rollwright.run.folder import RunFolder

SHADOW = 'raise SystemExit("a module of the working directory was imported")\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run, made in a working directory with files named like modules of the standard library."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("random", "queue", "grp", "types"):
        (folder / f"{name}.py").write_text(SHADOW)
    process = start(folder, "--set", "loop.steps=2", "--set", "evaluation.tasks=4")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    return RunFolder(folder / "runs" / "run-1")


@pytest.fixture
def run(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of it that is to go on for one step more."""
    shutil.copytree(finished.path, tmp_path / "runs" / "run-1")
    return RunFolder(tmp_path / "runs" / "run-1")


def forks(run: RunFolder) -> tuple[int, ...]:
    with closing(SqliteStore(run.store, 16, SystemClock())) as store:
        return store.lineage().forks


def checkpoint(run: RunFolder) -> Path:
    with closing(SqliteStore(run.store, 16, SystemClock())) as store:
        last = store.last_commit()
    assert last is not None
    return run.blobs / "checkpoints" / last.checkpoint[:2] / last.checkpoint[2:]


def again(run: RunFolder, steps: int = 3) -> list[str]:
    """Make it ready to go on; what was said."""
    said: list[str] = []
    assert reopen(run, [f"loop.steps={steps}"], SystemClock(), said.append) is not None
    return said


def overwrite(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"damage" * 100)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda run: checkpoint(run).unlink(), "blob"),
        (lambda run: overwrite(checkpoint(run)), "damaged"),
        (lambda run: run.store.unlink(), "run.db is missing"),
        (lambda run: run.store.write_bytes(b""), "run.db"),
        (lambda run: overwrite(run.store), "run.db"),
        (lambda run: run.config.write_text("{"), "config.json"),
        (lambda run: run.config.unlink(), "config.json"),
    ],
)
def test_what_cannot_be_mended_is_refused_before_anything_changes(
    run: RunFolder, damage: Callable[[RunFolder], None], told: str
) -> None:
    damage(run)
    with pytest.raises(RollwrightError) as caught:
        again(run)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert run.finished.exists()
    if run.store.is_file() and "run.db" not in told:
        assert forks(run) == (0,)


def test_the_tokenizer_is_made_anew(run: RunFolder) -> None:
    for damage in (lambda: run.tokenizer.unlink(), lambda: overwrite(run.tokenizer)):
        before = run.tokenizer.read_text()
        damage()
        (said,) = again(run)
        assert "made anew" in said
        assert run.tokenizer.read_text() == before


def test_a_damaged_archive_is_put_aside(run: RunFolder) -> None:
    run.rollouts.write_bytes(b"not a database at all, but long enough" * 100)
    (said,) = again(run)
    assert "lies in" in said and list(run.path.glob("rollouts-damaged-*.db"))
    with closing(opened(run.rollouts)) as archive:
        assert list(archive.lines()) == []


def test_a_run_never_goes_back(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="at step 2 already"):
        again(run, steps=1)


def test_a_run_keeps_its_id_when_its_folder_is_moved(run: RunFolder, tmp_path: Path) -> None:
    moved = run.path.rename(tmp_path / "elsewhere")
    (tmp_path / "latest").symlink_to(moved)
    for path in (moved, tmp_path / "latest"):
        assert RunFolder(path).id == "run-1"
        again(RunFolder(path))


def test_a_second_conductor_is_told_who_holds_the_folder(run: RunFolder) -> None:
    with held(run), pytest.raises(ConfigError, match="is running"), held(run):
        raise AssertionError("both hold it")


@pytest.mark.timeout(240)
def test_nothing_is_measured_twice_and_nothing_as_what_it_is_not(run: RunFolder) -> None:
    home = run.path.parent.parent
    before = [e.event for e in read_events(run.path) if isinstance(e.event, Evaluated)]
    assert [(e.label, e.step) for e in before] == [("before", 0)] * 2 + [("after", 2)] * 2
    run.finished.unlink()  # killed when all was done but said
    assert resume(home).returncode == 0
    assert [e.event for e in read_events(run.path) if isinstance(e.event, Evaluated)] == before
    for log in run.path.glob("events-*.jsonl"):
        log.unlink()
    done = resume(home, "--set", "loop.steps=3")
    assert done.returncode == 0, done.stderr
    seen = [logged.event for logged in read_events(run.path)]
    assert [(e.label, e.step) for e in seen if isinstance(e, Evaluated)] == [("after", 3)] * 2
    assert any("before was not measured" in e.text for e in seen if isinstance(e, Noted))
