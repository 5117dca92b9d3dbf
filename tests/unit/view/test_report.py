"""The report says what the records say, in whatever state the run is, and no text of a run becomes markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_run import made_run
from msgspec.structs import replace
from typer.testing import CliRunner

from rollwright.archive.reader import opened
from rollwright.archive.sqlite import SqliteArchive
from rollwright.buffer.sqlite import SqliteStore
from rollwright.cli.main import app
from rollwright.config import load
from rollwright.errors import ConfigError, StoreError
from rollwright.events import Evaluated, EventLog, Metrics, Noted, Resumed, RunStarted, StepEnded
from rollwright.run.folder import RunFolder, create
from rollwright.testing.clock import FakeClock
from rollwright.types import Scored
from rollwright.view.facts import measured
from rollwright.view.folder import viewed
from rollwright.view.report import SCRIPTS, STYLES, write_report
from rollwright.view.trace import Tracer

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"'`{{ 7 * 7 }}{% for %}</script><!--&amp;\u202e\x00"
)
ELEMENTS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "main",
        "section",
        "nav",
        "aside",
        "article",
    ),
    *(
        "div",
        "span",
        "p",
        "h1",
        "h2",
        "h3",
        "a",
        "b",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "pre",
        "code",
        "noscript",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "line", "circle", "details", "summary"),
    *("form", "input", "output", "script"),
}


class Page(HTMLParser):
    """A report taken apart: elements, attributes, text, data blocks and executed scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.said: list[str] = []
        self.policy = ""
        self._in: tuple[str, str] = ("", "")
        self.feed(path.read_text())
        self.text = " ".join(" ".join(self.said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self._in = (tag, given.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        self._in = ("", "")

    def handle_data(self, data: str) -> None:
        tag, id = self._in
        if tag == "style":
            self.styles.append(data)
        elif tag == "script" and id:
            self.blocks[id] = data
        elif tag == "script":
            self.scripts.append(data)
        else:
            self.said.append(data)

    def data(self, id: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.blocks[id])))

    def rollout(self, id: str) -> dict[str, Any]:
        index = self.data("data-index")
        at = index["id"].index(id)
        found: dict[str, Any] = self.data(f"chunk-{index['chunk'][at]}")["rollouts"][index["place"][at]]
        return found


def report(folder: RunFolder, rollouts: int = 10_000) -> Page:
    return Page(write_report(folder, None, rollouts).path)


def check_harmless(page: Page) -> None:
    """Only our elements, our scripts and our attributes."""
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    assert len(page.scripts) == len(SCRIPTS) and len(page.styles) == len(STYLES)
    for _, held in page.elements:
        assert not any(name.startswith("on") or name in ("src", "style", "action") for name in held)
        assert all(value.startswith("#") for name, value in held.items() if name == "href" and value)


def test_hostile_text_in_every_field_stays_text(tmp_path: Path) -> None:
    page = report(made_run(tmp_path, 48, hostile=HOSTILE))
    check_harmless(page)
    assert page.text.count("<script>alert(1)</script>") > 20 and "{{ 7 * 7 }}" in page.text
    body = page.rollout("0-g1/0.0")
    call, result = body["turns"][0]["calls"][0], body["turns"][0]["results"][0]
    for text in (body["answer"], body["scorer"], body["turns"][0]["text"], call["id"], call["raw"]):
        assert HOSTILE in text
    assert json.loads(call["arguments"])["query" + HOSTILE].endswith(HOSTILE)
    assert result["content"].endswith(HOSTILE)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_stays_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_harmless(report(made_run(tmp_path_factory.mktemp("run"), 24, hostile=text)))


def test_the_policy_names_exactly_our_scripts_and_styles(tmp_path: Path) -> None:
    page = report(made_run(tmp_path, 32))
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    for name, texts in (("script-src", page.scripts), ("style-src", page.styles)):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[name] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"


def test_a_rollout_is_embedded_as_it_was_kept(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 64)
    page, archive = report(folder), opened(folder.rollouts)
    tokens = page.data("data-overview")["tokens"]
    for line in archive.lines():
        kept, body = archive.kept(line.rollout), page.rollout(line.rollout)
        assert kept is not None
        (row,), shown = kept.scored.rollout.rows, body["rows"][0]
        assert shown["tokens"] == row.tokens.tolist()
        spread = [value for value, length in shown["provenance"] for _ in range(length)]
        assert spread == row.provenance.tolist()
        told = [value / 1000 for value in shown["logprobs"]]
        assert told == pytest.approx(row.logprobs[row.sampled].tolist(), abs=0.00051)
        assert [turn["text"] for turn in body["turns"]] == [turn.text for turn in kept.scored.rollout.turns]
        text = b"".join(
            tokens[id].encode("latin-1") for id in shown["tokens"][: kept.scored.rollout.turns[0].end]
        )
        assert text.decode().endswith(kept.scored.rollout.turns[0].text)
        if samples := archive.samples(line.rollout):
            spread = [value for value, length in shown["advantages"] for _ in range(length)]
            assert spread == pytest.approx(samples[0].advantages.tolist())
            assert shown["version"] == samples[0].version
        else:
            assert "advantages" not in shown
    archive.close()


def test_the_list_says_where_each_rollout_stands(tmp_path: Path) -> None:
    page = report(made_run(tmp_path, 320))
    index = page.data("data-index")

    def named(column: str, at: int) -> str:
        name: str = index[column]["names"][index[column]["at"][at]]
        return name

    at = index["id"].index("0-g1/0.0")
    assert (named("group", at), named("task", at), named("split", at)) == ("0-g1", "made/train/1", "train")
    assert named("disposition", at) in ("trained", "unscorable") and index["step"][at] == 0
    at = index["id"].index("0-after-sampled/0.0")
    assert named("split", at) == "after, sampled" and named("disposition", at) in ("evaluated", "void")
    assert set(index["reward"]) == {0.0, 1.0, None}


def test_of_many_rollouts_whole_groups_are_embedded_and_all_are_listed(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 320)
    page = report(folder, 100)
    index = page.data("data-index")
    inside = {id for id, chunk in zip(index["id"], index["chunk"], strict=True) if chunk >= 0}
    assert len(index["id"]) == 320 and 80 <= len(inside) <= 100
    groups: dict[int, set[bool]] = {}
    for id, group in zip(index["id"], index["group"]["at"], strict=True):
        groups.setdefault(group, set()).add(id in inside)
    assert all(len(found) == 1 for found in groups.values())
    steps = {step for id, step in zip(index["id"], index["step"], strict=True) if id in inside}
    assert {0, 1, 2} <= steps  # from the whole run
    assert f"{len(inside)} of 320 rollouts are in this file whole" in page.text
    assert "rollwright trace ID" in page.text
    assert not any(chunk >= 0 for chunk in report(folder, 0).data("data-index")["chunk"])


def test_a_page_does_not_grow_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_run(tmp_path, 640)
    whole = sum(len(text) for id, text in report(folder).blocks.items() if id.startswith("chunk"))
    monkeypatch.setattr("rollwright.view.rollouts.PAGE_BYTES", whole // 3)
    page = report(folder)
    taken = sum(len(text) for id, text in page.blocks.items() if id.startswith("chunk"))
    assert whole / 5 < taken < whole / 2
    assert len(page.data("data-index")["id"]) == 640


def test_a_run_without_anything_says_so(tmp_path: Path) -> None:
    page = report(create(load([], [f"folder={tmp_path}"])))
    check_harmless(page)
    for text in ("stopped", "Nothing was evaluated", "No rollout has ended", "No ledger on disk", "warn of"):
        assert text in page.text
    charts = page.data("data-overview")["charts"]
    assert len(charts) > 8 and all(chart["empty"] and not chart["x"] for chart in charts)


def test_a_run_killed_half_way_is_reported(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 200, finished=False)
    with folder.events("trainer").open("ab") as file:
        file.write(b'{"schema":1,"wall":17')  # torn by the kill
    page = report(folder)
    check_harmless(page)
    assert "stopped" in page.text and "0 at step 0, 1 at step" in page.text
    for text in ("running", "queued", "trained", "needs two measurements"):
        assert text in page.text
    assert page.data("data-overview")["charts"][0]["marks"]


def test_what_ended_a_run_stands_at_its_head(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 32, finished=False)
    for text in ("no signal <b>", "what followed"):
        events = EventLog(folder.events("trainer"))
        events.emit(Noted(level="fatal", text=text))
        events.close()
    assert "Ended by: no signal <b> " in report(folder).text
    events = EventLog(folder.events("trainer"))
    events.emit(RunStarted(run=folder.id, process="trainer", incarnation=2))
    events.close()
    assert "Ended by" not in report(folder).text  # it was taken up again since


def test_the_figures_of_the_engine_have_curves_and_a_line(tmp_path: Path) -> None:
    folder = create(load([], [f"folder={tmp_path}"]))
    events = EventLog(folder.events("rollouts"))
    for gap in (8.0, 12.0):
        values = {"engine/decode_rate": 1500.0, "engine/decode_variation": 0.04, "engine/gap_p99_ms": gap}
        events.emit(Metrics(process="rollouts", values=values))
    events.close()
    page = report(folder)
    curves = {chart["title"]: chart for chart in page.data("data-overview")["charts"]}
    drawn = {name: curves[name]["series"][0]["values"] for name in ("Gap between tokens", "Decode stability")}
    assert drawn == {"Gap between tokens": [8.0, 12.0], "Decode stability": [0.04, 0.04]}
    assert [each["name"] for each in curves["Tokens per second"]["series"]] == ["sampled, while computing"]
    assert "no completion has ended under a constraint" in curves["Compliance"]["empty"]
    assert "hits no data, decode 1,500 tok/s ± 4 %, p99 gap 12 ms, compliance no data" in page.text


def test_a_run_that_goes_on_is_running(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 32, finished=False)
    hold = (
        "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "f.write(str(os.getpid())); f.flush(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder.lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert ("span", {"class": "pill running"}) in report(folder).elements
        holder.communicate("")
    assert ("span", {"class": "pill stopped"}) in report(folder).elements
    folder.finished.touch()
    assert ("span", {"class": "pill finished"}) in report(folder).elements


def test_a_configuration_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 32)
    stored = json.loads(folder.config.read_text())
    stored["config"]["tasks"]["type"] = "gone_plugin"
    folder.config.write_text(json.dumps(stored))
    page = report(folder)
    assert "The configuration could not be read" in page.text and "gone_plugin" in page.text


def test_a_missing_ledger_and_tokenizer_are_no_end(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 32)
    folder.store.unlink()
    folder.tokenizer.write_text("{")
    page = report(folder)
    assert "No ledger on disk" in page.text
    assert page.data("data-overview")["tokens"] == []


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        write_report(RunFolder(tmp_path / "none"))
    folder = made_run(tmp_path, 32)
    with pytest.raises(ConfigError, match=r"missing/r\.html: the report cannot be written"):
        write_report(folder, tmp_path / "missing" / "r.html")
    assert not list(tmp_path.glob("**/.*html*"))
    folder.rollouts.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=r"rollouts\.db is damaged"):
        write_report(folder)


def evaluate(folder: RunFolder, label: str, wins: int, *, step: int, process: str, **more: Any) -> None:
    events = EventLog(folder.events(process))
    more = {"rollouts": f"{label}-sampled", **more}
    events.emit(
        Evaluated(
            label=label, mode="sampled", successes=wins, trials=16, low=wins / 20, high=1.0, step=step, **more
        )
    )
    events.close()


def measured_rows(page: Page) -> str:
    return (
        page.text.partition("Before and after")[2].partition("Further evaluations")[0].partition("Curves")[0]
    )


def test_what_eval_measures_of_other_tasks_changes_no_gain(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 320)
    before = measured_rows(report(folder))
    assert "points" in before
    archive = SqliteArchive(folder.rollouts)
    for line in list(archive.lines()):
        kept = archive.kept(line.rollout)
        if kept is None or line.job != "eval" or "after" not in line.rollout:
            continue
        # the same task ids, other contents, and all of them wrong
        task = replace(kept.task, messages=kept.task.messages[:1])
        identity = replace(kept.scored.rollout.identity, rollout=line.rollout.replace("0-after", "eval-1"))
        identity = replace(identity, group=line.group.replace("0-after", "eval-1"))
        score = replace(kept.scored.score, value=0.0)
        archive.add(task, Scored(rollout=replace(kept.scored.rollout, identity=identity), score=score))
    archive.close()
    evaluate(folder, "eval-1", 0, step=18, process="eval-1")
    page = report(folder)
    assert measured_rows(page) == before
    assert "eval-1, sampled 0.0 %" in page.text or "eval-1 (step 18), sampled 0.0 %" in page.text
    assert page.rollout("0-after-sampled/0.0")["id"] == "0-after-sampled/0.0"
    index = page.data("data-index")
    assert "eval-1, sampled" in index["split"]["names"]
    chart = page.data("data-overview")["charts"][0]
    (held,) = [series for series in chart["series"] if series["name"] == "held-out, sampled"]
    assert 0.0 not in held["values"]


def test_only_the_same_tasks_are_paired(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 320)
    with viewed(folder) as view:
        pairs = measured(view)[0].pairs
    archive = SqliteArchive(folder.rollouts)
    changed = [line for line in archive.lines() if "after" in line.rollout and line.value is not None][:5]
    for line in changed:
        kept = archive.kept(line.rollout)
        assert kept is not None
        archive.add(replace(kept.task, tags={"other": "1"}), kept.scored)
    archive.close()
    with viewed(folder) as view:
        assert pairs - 5 <= measured(view)[0].pairs < pairs


def test_an_after_of_an_earlier_step_says_so_and_stands_at_its_step(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 320)
    assert "(step" not in measured_rows(report(folder))
    events = EventLog(folder.events("trainer"))
    events.emit(Resumed(step=3, version="policy@1.3"))
    for step in range(4, 30):
        events.emit(StepEnded(step=step, incarnation=1, metrics={}))
    events.close()
    page = report(folder)
    assert "after (step 3)" in measured_rows(page) and "before (step" not in page.text
    evaluate(folder, "after", 16, step=29, process="rollouts", incarnation=1, rollouts="1-after-sampled")
    assert "after (step" not in measured_rows(report(folder))
    chart = page.data("data-overview")["charts"][0]
    (held,) = [series for series in chart["series"] if series["name"] == "held-out, sampled"]
    assert [at for at, value in zip(chart["x"], held["values"], strict=True) if value is not None] == [0, 3]


class Settable(FakeClock):
    back = 0.0

    def wall(self) -> float:
        return super().wall() - self.back


def test_a_clock_that_was_set_back_changes_nothing_that_is_shown(tmp_path: Path) -> None:
    pages = []
    for back in (0.0, 7200.0):
        folder = made_run(tmp_path / str(back), 320)
        clock = Settable()
        clock.back = back
        events = EventLog(folder.events("trainer"), clock)
        events.emit(Resumed(step=2, version="policy@1.2"))
        events.emit(StepEnded(step=3, incarnation=1, metrics={"train/entropy": 0.25}))
        events.close()
        evaluate(folder, "after", 16, step=3, process="trainer", incarnation=1, rollouts="1-after-sampled")
        pages.append(report(folder))
    assert measured_rows(pages[0]) == measured_rows(pages[1])
    first, second = (page.data("data-overview")["charts"] for page in pages)
    assert [chart for chart in first if chart["axis"] == "step"] == [
        chart for chart in second if chart["axis"] == "step"
    ]


def test_a_report_changes_nothing_in_the_folder_but_its_own_file(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 64)

    def held() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}

    before = held()
    report(folder)
    with Tracer(folder) as tracer:
        tracer.trace("0-g0/0.0")
    after = held()
    assert after.pop("report.html") and after == before


READ_ONLY = """
import ctypes, sys
# Root writes everywhere: without CAP_DAC_OVERRIDE it is a user like others.
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None)
assert libc.capget(header, sets) == 0
sets[0] &= ~0b1110
assert libc.capset(header, sets) == 0
from rollwright.cli.main import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize("live", [False, True])
def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path, live: bool) -> None:
    folder, page = made_run(tmp_path / "runs", 64), tmp_path / "r.html"
    held: list[SqliteArchive | SqliteStore] = []
    if live:  # a run that goes on, or was copied while it did, has a log beside its databases
        held = [SqliteArchive(folder.rollouts), SqliteStore(folder.store, 1, FakeClock())]
        for path in (folder.rollouts, folder.store):
            with closing(sqlite3.connect(path)) as db:
                db.execute("UPDATE meta SET version = version")
                db.commit()
        for path in folder.path.glob("*-shm"):
            path.unlink()

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", READ_ONLY, *arguments]
        return subprocess.run(command, text=True, capture_output=True, check=False)

    before = sorted(folder.path.iterdir())
    modes = {path: path.stat().st_mode for path in (folder.path, *folder.path.rglob("*"))}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        for arguments in (
            ["report", str(folder.path), "--output", str(page)],
            ["trace", "0-g0/0.0", "--run", str(folder.path)],
        ):
            done = ask(*arguments)
            assert done.returncode == 0, done.stderr
        assert len(Page(page).data("data-index")["id"]) == 64
        done = ask("report", str(folder.path))
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "report.html: the report cannot be written" in done.stderr and "--output" in done.stderr
        assert sorted(folder.path.iterdir()) == before
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
        for each in held:
            each.close()


def test_a_damaged_record_is_counted_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 64)
    with closing(sqlite3.connect(folder.rollouts)) as db:
        db.execute("UPDATE bodies SET data = x'00' WHERE rollout IN ('0-g1/0.0', '0-g1/1.0')")
        db.commit()
    page = report(folder)
    assert "2 of 64 records are damaged and cannot be shown: 0-g1/0.0, 0-g1/1.0" in page.text
    index = page.data("data-index")
    assert [id for id, chunk in zip(index["id"], index["chunk"], strict=True) if chunk < 0] == [
        "0-g1/0.0",
        "0-g1/1.0",
    ]


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    folder = made_run(tmp_path, 64)
    output = tmp_path / "r.html"
    done = CliRunner().invoke(app, ["report", str(folder.path), "--output", str(output), "--rollouts", "8"])
    assert done.exit_code == 0 and output.is_file()
    assert f"{output} (" in done.output and "of 64 rollouts" in done.output
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 2
