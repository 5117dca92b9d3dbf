"""The run folder and what is checked before a run starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rollwright.config import load
from rollwright.errors import ConfigError
from rollwright.run.folder import RunFolder, create
from rollwright.run.preflight import taskset
from rollwright.view.report import write_report
from rollwright.view.settings import settings


def test_the_resolved_configuration_comes_back(tmp_path: Path) -> None:
    config = load([], [f"folder={tmp_path}", "tasks.hops=2", "model.context=256"])
    folder = create(config)
    assert folder.load() == config
    assert create(config).id == "run-2"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": 1}', '{"schema": 99, "config": {}}', '{"schema": 1, "config": {"a": 1}}'],
)
def test_a_foreign_configuration_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        RunFolder(tmp_path).load()
    assert "\n" not in str(caught.value)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        RunFolder(tmp_path / "nothing").load()


def test_the_schema_is_written(tmp_path: Path) -> None:
    assert json.loads(create(load([], [f"folder={tmp_path}"])).config.read_text())["schema"] == 1


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--set folder="):
        create(load([], [f"folder={tmp_path / 'file' / 'runs'}"]))


def test_rows_that_cannot_fit_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"model\.context"):
        taskset(load([], ["model.context=64"]))


@pytest.mark.parametrize("key", ["heads", "layers", "dim", "context"])
def test_a_model_without_size_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{key}"):
        load([], [f"model.{key}=0"])


def test_looking_at_a_run_imports_no_class_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported by a look')\n")
    folder = create(load([], [f"folder={tmp_path / 'runs'}", "loop.steps=7"]))
    stored = json.loads(folder.config.read_text())
    stored["config"] |= {"tasks": {"type": "trap:Tasks", "size": 3}, "imports": [str(tmp_path)]}
    folder.config.write_text(json.dumps(stored))
    seen = folder.peek()
    assert seen.loop.steps == 7 and seen.imports == (str(tmp_path),)
    assert {s.key: s.value for s in settings(seen)}["tasks.size"] == "3"
    assert str(tmp_path) not in sys.path
    assert write_report(folder).path.is_file()
    with pytest.raises(SystemExit):
        RunFolder(folder.path).load()
