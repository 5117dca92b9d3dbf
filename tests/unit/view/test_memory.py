"""The report's two sections on memory: planned against measured, and the limits that rollouts would need."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import made_run

from rollwright.config import load
from rollwright.events import EventLog, Metrics
from rollwright.run.derived import derive, planned
from rollwright.run.folder import RunFolder
from rollwright.run.preflight import taskset
from rollwright.testing.clock import FakeClock
from rollwright.view.folder import viewed
from rollwright.view.memory import Memory, caps, memory
from rollwright.view.report import write_report


def tell(run: RunFolder, process: str, *values: dict[str, float]) -> None:
    log = EventLog(run.events(process), FakeClock())
    for each in values:
        log.emit(Metrics(process="rollouts", values=each))
    log.close()


def of(run: RunFolder) -> Memory | None:
    with viewed(run) as view:
        return memory(view)


def test_a_run_tells_what_it_planned() -> None:
    config = load([], ["engine.kv_tokens=1000"])
    tasks, told = taskset(config), derive(config, taskset(config))
    event = planned(config, tasks)
    assert event is not None and told.kv_rows_bytes is not None and told.kv_cache_bytes is not None
    assert event.values["engine/kv_planned"] == told.kv_rows_bytes + told.kv_cache_bytes


def test_planned_against_the_most_that_was_measured(tmp_path: Path) -> None:
    run = made_run(tmp_path, 48)
    assert of(run) is None and "Memory of keys" not in write_report(run).path.read_text()
    tell(run, "rollouts", {"engine/kv_planned": 4.0 * 2**20})
    found = of(run)
    assert found is not None and found.share is None and "nothing was measured" in found.text
    tell(
        run,
        "rollouts",
        {"engine/kv_bytes": 2.0**20},
        {"engine/kv_bytes": 3.0 * 2**20},
        {"engine/kv_bytes": 1.0},
    )
    assert of(run) == Memory(4 * 2**20, 3 * 2**20)
    assert "3 MiB measured at most, 4 MiB planned at most: 75.0 %" in write_report(run).path.read_text()


def test_an_evaluation_from_outside_and_an_earlier_part_do_not_count(tmp_path: Path) -> None:
    run = made_run(tmp_path, 48)
    first = [{"engine/kv_planned": 800.0}, {"engine/kv_bytes": 700.0}]
    tell(run, "rollouts", *first, {"engine/kv_planned": 400.0}, {"engine/kv_bytes": 100.0})
    tell(run, "eval-1", {"engine/kv_planned": 9.0}, {"engine/kv_bytes": 9.0})
    assert of(run) == Memory(400, 100)


def test_limits_are_learned_from_training_rollouts_only(tmp_path: Path) -> None:
    run = made_run(tmp_path, 160)
    with viewed(run) as view:
        assert view.archive is not None
        found = caps(view)
        train = [line.rollout for line in view.lines if line.job == "train"]
        rows = [
            max(len(row.tokens) for row in kept.scored.rollout.rows)
            for _, kept, _ in view.archive.whole(train)
            if kept.scored.rollout.outcome.scorable and kept.scored.rollout.turns
        ]
    tokens = [cap for cap, _ in found.lines if cap.limit == "max_tokens"]
    assert sum(cap.rollouts for cap in tokens) == len(rows) < len(view.lines)
    assert max(cap.longest for cap in tokens) == max(rows)
    page = write_report(run).path.read_text()
    assert "How long rollouts got" in page and "Nothing was changed" in page


@pytest.mark.parametrize("planned_bytes", [0.0, 1.0])
def test_a_share_of_nothing_is_none(planned_bytes: float) -> None:
    assert Memory(planned_bytes, None).share is None
