"""What `rollwright serve` refuses before it serves: one line, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.errors import ConfigError
from rollwright.run.serving import UNSERVED, refused


def line(*arguments: str) -> str:
    """The one line that `rollwright serve` ends with."""
    done = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert done.exit_code == 2 and done.stdout == "", done.output
    assert isinstance(done.exception, SystemExit) and len(done.stderr.splitlines()) == 1
    return done.stderr


def test_a_device_of_no_such_name(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("[model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nffn = 16\n")
    said = line("--fresh", str(tmp_path / "small.toml"), "--device", "foo")
    assert "--device 'foo': expected cpu, cuda, cuda:1 or mps" in said


def test_a_folder_that_is_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nosuchfolder"):
        said = line(str(folder))
        assert "expected a run folder, or a Hugging Face model's" in said


def written(folder: Path, **keys: object) -> Path:
    """A model folder with nothing but a config.json."""
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def test_a_model_that_is_not_served_is_refused_by_its_config_alone(tmp_path: Path) -> None:
    said = line(str(written(tmp_path, model_type="gemma2")))
    assert "models of the type 'gemma2' are not served: they have softcapped attention scores" in said


@pytest.mark.parametrize("kind", UNSERVED)
def test_every_type_says_why(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=UNSERVED[kind].partition("(")[0]):
        refused(written(tmp_path, model_type=kind))


def test_what_may_be_served_is_left_to_the_model(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"model_type": "llama"},
        {"model_type": "gemma2", "attn_logit_softcapping": None},
        {"architectures": ["X"]},
    ]
    for kind in kinds:
        try:
            refused(written(tmp_path, **kind))
        except ConfigError as error:
            pytest.fail(f"{kind}: {error}")
