"""`rollwright trace`: from any id of a run to everything connected with it, and back."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from made_run import made_run
from rich.console import Console
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.errors import ConfigError
from rollwright.run.folder import RunFolder
from rollwright.types import Disposition
from rollwright.view.trace import Tracer
from rollwright.view.trace_text import tree

HOSTILE = "\x1b[31m[red]<script>alert(1)</script>\x07"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return made_run(tmp_path_factory.mktemp("runs"), 320)


def shown(tracer: Tracer, id: str) -> str:
    out = io.StringIO()
    Console(file=out, width=1000).print(tree(tracer.trace(id)))
    return out.getvalue()


def test_every_trained_rollout_and_its_checkpoint_find_each_other(run: RunFolder) -> None:
    with Tracer(run) as tracer:
        lines = {brief.rollout: brief for brief in tracer.trace("0-g0").siblings}
        for number in range(1, 30):
            lines |= {brief.rollout: brief for brief in tracer.trace(f"0-g{number}").siblings}
        trained = [brief for brief in lines.values() if brief.disposition == Disposition.TRAINED.value]
        assert len(trained) > 150
        for brief in trained[::7]:
            found = tracer.trace(brief.rollout)
            assert found.rollout is not None and found.commit is not None and found.task is not None
            assert found.commit.version == brief.version
            for back in (brief.version, found.commit.checkpoint):
                assert brief.rollout in [each.rollout for each in tracer.trace(back).trained]
            (sample,) = found.rollout.samples
            assert sample.committed and tracer.trace(sample.id).rollout == found.rollout
            for turn in found.rollout.turns:
                for made in turn.versions:
                    assert brief.rollout in [each.rollout for each in tracer.trace(made).made]
                for call in turn.calls:
                    text = shown(tracer, brief.rollout)
                    assert call.id in text and call.content in text
            assert brief.rollout in [each.rollout for each in tracer.trace(found.task.id).siblings]
            again = tracer.trace(found.rollout.trace)
            assert again.rollout is not None and again.rollout.brief == brief


def test_what_was_not_trained_says_what_became_of_it(run: RunFolder) -> None:
    with Tracer(run) as tracer:
        briefs = [brief for number in range(30) for brief in tracer.trace(f"0-g{number}").siblings]
        lost = next(brief for brief in briefs if brief.value is None)
        found = tracer.trace(lost.rollout)
        assert found.commit is None and found.rollout is not None and not found.rollout.samples
        assert lost.disposition == "unscorable" and "no sandbox" in shown(tracer, lost.rollout)
        evaluated = tracer.trace("0-before-sampled/0")
        assert [brief.disposition for brief in evaluated.siblings] in (["evaluated"], ["void"])


def test_a_rollout_that_never_ended_is_found_in_the_ledger(tmp_path: Path) -> None:
    with Tracer(made_run(tmp_path, 100, finished=False)) as tracer:
        found = tracer.trace("0-open/0.0")
        assert found.rollout is not None and found.rollout.brief.disposition == "running"
        assert "ended before it did" in shown(tracer, "0-open/0.0")


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    with Tracer(made_run(tmp_path, 60, hostile=HOSTILE)) as tracer:
        text = shown(tracer, "0-g0/0.0")
    assert "<script>alert(1)</script>" in text and "[red]" in text
    assert "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize(
    "id",
    ["0-g999", "0-g0/0.0/9/9", "policy@7.7", "f" * 64, "0" * 32, "0-g0/0.0#x", "", "../../etc", "deadbeef"],
)
def test_what_is_nowhere_is_one_clear_line(run: RunFolder, id: str) -> None:
    with Tracer(run) as tracer, pytest.raises(ConfigError) as caught:
        tracer.trace(id)
    assert repr(id)[1:-1] in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_prints_text_and_json(run: RunFolder) -> None:
    text = CliRunner().invoke(app, ["trace", "0-g3/1.0", "--run", str(run.path)])
    assert text.exit_code == 0 and re.search(r"rollout 0-g3/1\.0", text.output)
    newest = CliRunner().invoke(app, ["trace", "0-g3/1.0", "--folder", str(run.path.parent), "--json"])
    found = json.loads(newest.output)
    assert (found["kind"], found["id"], found["run"]) == ("rollout", "0-g3/1.0", run.id)
    assert found["rollout"]["turns"][0]["calls"][0]["name"] == "sql"
    missing = CliRunner().invoke(app, ["trace", "x", "--run", str(run.path.parent / "none")])
    assert missing.exit_code == 2 and "no run folder" in missing.output
