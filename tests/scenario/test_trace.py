"""`rollwright trace`: from any id of a run to everything connected with it, and back."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from made_run import made_run
from rich.console import Console
from typer.testing import CliRunner

from rollwright.archive.sqlite import SqliteArchive
from rollwright.cli.main import app
from rollwright.errors import ConfigError
from rollwright.events import EventLog, WeightsPushed
from rollwright.guard.audit import AuditLog
from rollwright.run.folder import RunFolder
from rollwright.types import Disposition, Identity
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
    [
        "0-g999",
        "0-g0/0.0/9/9",
        "policy@7.7",
        "f" * 64,
        "0" * 32,
        "0-g0/0.0#x",
        "",
        "../../etc",
        "deadbeef",
        "0-g1/0.0#99",
        "0-before-sampled/0.0#0",
    ],
)
def test_what_is_nowhere_is_one_clear_line(run: RunFolder, id: str) -> None:
    with Tracer(run) as tracer, pytest.raises(ConfigError) as caught:
        tracer.trace(id)
    assert repr(id)[1:-1] in str(caught.value) and "\n" not in str(caught.value)


def test_an_id_that_is_no_text_is_one_clear_line(run: RunFolder) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "rollwright.cli.main",
        "trace",
        b"0-g0\xff",
        "--run",
        str(run.path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("rollwright: ") and done.stderr.count("\n") == 1


def test_a_digest_that_could_be_several_is_one_clear_line(tmp_path: Path) -> None:
    run = made_run(tmp_path, 400)
    events = EventLog(run.events("rollouts"))
    for version, digest in (
        ("policy@0.0", "ab" * 32),
        ("policy@0.1", "abc" + "0" * 61),
        ("policy@1.1", "c" * 64),
    ):
        events.emit(WeightsPushed(version=version, digest=digest, gap=0.0, seconds=0.1))
    events.emit(WeightsPushed(version="policy@1.2", digest="c" * 64, gap=0.0, seconds=0.1))
    events.close()
    with Tracer(run) as tracer:
        assert tracer.trace("ab" * 32).id == "ab" * 32
        for id in ("abababab", "abc00000"):
            assert tracer.trace(id).kind == "version"
        with pytest.raises(ConfigError, match=r"of 2 versions: ask for one of policy@1\.1, policy@1\.2$"):
            tracer.trace("c" * 64)
        with pytest.raises(ConfigError, match="give more of its digits"):
            tracer.trace("00000000")  # every checkpoint
    events = EventLog(run.events("rollouts"))
    events.emit(WeightsPushed(version="policy@0.2", digest="abababab" + "1" * 56, gap=0.0, seconds=0.1))
    events.close()
    with Tracer(run) as tracer, pytest.raises(ConfigError, match="begins 2 weights: give more of its digits"):
        tracer.trace("abababab")


@pytest.mark.parametrize("damage", [b"\xff", b"}", b"", b"allowed"])
def test_a_damaged_line_of_the_audit_log_is_named_and_passed_over(tmp_path: Path, damage: bytes) -> None:
    run = made_run(tmp_path, 40)
    identity = Identity(run=run.id, task="t", group="0-g0", rollout="0-g0/0.0")
    audit = AuditLog(run.audit("rollouts"))
    for call in ("0-g0/0.0/0", "0-g0/0.0/1"):
        audit.append("decided", identity, call, {"reason": "denied"})
    audit.close()
    first, second = run.audit("rollouts").read_bytes().splitlines(keepends=True)
    assert b"denied" in first
    run.audit("rollouts").write_bytes(first.replace(b"denied", damage) + second)
    with Tracer(run) as tracer:
        found, text = tracer.trace("0-g0/0.0"), shown(tracer, "0-g0/0.0")
    (line,) = found.damaged
    assert line.startswith("audit-rollouts.jsonl line 1: ")
    assert "audit-rollouts.jsonl line 1" in text and "passed over" in text
    calls = [call for turn in found.rollout.turns for call in turn.calls] if found.rollout else []
    audited = [entry.number for call in calls for entry in call.audit]
    assert audited in ([2], [])  # the sound line, where the rollout made that call


def test_a_damaged_record_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path, 40)
    with closing(sqlite3.connect(run.rollouts)) as db:
        db.execute("UPDATE bodies SET data = x'00'")
        db.commit()
    with Tracer(run) as tracer:
        assert "its record is damaged" in shown(tracer, "0-g0/0.0")
        assert tracer.trace("0-g0").siblings


def test_siblings_are_in_the_order_of_their_seats_and_turns_count_from_0(tmp_path: Path) -> None:
    run = made_run(tmp_path, 100, size=24)
    archive = SqliteArchive(run.rollouts)
    for line in reversed(archive.of_group("0-g1")):  # they ended in another order than they began
        kept = archive.kept(line.rollout)
        assert kept is not None
        archive.add(kept.task, kept.scored)
    archive.close()
    with Tracer(run) as tracer:
        found = tracer.trace("0-g1/3.0")
    assert [brief.rollout for brief in found.siblings] == [f"0-g1/{seat}.0" for seat in range(24)]
    assert found.rollout is not None and found.rollout.turns[0].number == 0


def test_a_score_says_what_it_lacked(run: RunFolder) -> None:
    with Tracer(run) as tracer:
        brief = next(brief for brief in tracer.trace("0-g0").siblings if brief.value is not None)
        assert "answer_equals  said" in shown(tracer, brief.rollout)


def test_the_command_prints_text_and_json(run: RunFolder) -> None:
    text = CliRunner().invoke(app, ["trace", "0-g3/1.0", "--run", str(run.path)])
    assert text.exit_code == 0 and re.search(r"rollout 0-g3/1\.0", text.output)
    newest = CliRunner().invoke(app, ["trace", "0-g3/1.0", "--folder", str(run.path.parent), "--json"])
    found = json.loads(newest.output)
    assert (found["kind"], found["id"], found["run"]) == ("rollout", "0-g3/1.0", run.id)
    assert found["rollout"]["turns"][0]["calls"][0]["name"] == "sql"
    missing = CliRunner().invoke(app, ["trace", "x", "--run", str(run.path.parent / "none")])
    assert missing.exit_code == 2 and "no run folder" in missing.output
