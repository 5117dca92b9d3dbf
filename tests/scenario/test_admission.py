"""A run admits no more rollouts than the plan of keys and values has room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import TINY, run

from rollwright.config import load
from rollwright.events import Noted, read_events
from rollwright.rollout.attempt import Attempts
from rollwright.run.derived import admitted
from rollwright.run.preflight import taskset

SMALL = ("engine.max_batch=2", "engine.kv_tokens=64", "rollout.concurrency=8")


async def test_a_run_keeps_to_its_plan_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_one, under_way, most = Attempts.run, 0, 0

    async def counted(self: Attempts, *given: Any, **named: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await run_one(self, *given, **named)
        finally:
            under_way -= 1

    monkeypatch.setattr(Attempts, "run", counted)
    config = load([], [*TINY, *SMALL])
    room = admitted(config, taskset(config).task("train", 0).limits.max_tokens)
    assert room is not None and 1 <= room < 8
    folder = await run(tmp_path, *SMALL)
    told = [each.event for each in read_events(folder.path)]
    assert any(
        isinstance(event, Noted) and event.text.startswith(f"{room} rollouts at once instead of")
        for event in told
    )
    assert most == room
