"""Whatever an engine goes through, each token is the one a cold engine draws, with the same logprob."""

from collections import Counter

import pytest
from cold import TOLERANCE
from schedules import MECHANISMS, Play, Settings

from rollwright.engine.embedded import attend, histories, scheduler

HAPPENED = {
    *MECHANISMS,
    *("replayed", "computed", "read in place", "read in place by several", "several levels", "fused chunks"),
    *("prompts beside decoding", "prompts cut", "forked", "streamed", "refused", "cancelled", "cached"),
    *("stop", "length", "abort", "several versions", "keep", "wait", "abort all", "update while paused"),
    *("update continue", "update restart", "update stop"),
}
"""What the schedules must have led to."""
RARE = {"compacted rows", "dropped"}


async def play(seeds: range, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], float]:
    """Play them all; what happened, in how many schedules, and the largest difference of a logprob."""

    def tune(settings: Settings) -> None:
        for module in (histories, scheduler):
            monkeypatch.setattr(module, "SHARE", settings.share)
        monkeypatch.setattr(attend, "SMALL", settings.small)

    total: Counter[str] = Counter()
    worst = 0.0
    for seed in seeds:
        schedule = Play(seed)

        try:
            await schedule.run(tune)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        total.update({name for name, count in schedule.counts.items() if count})
        worst = max(worst, schedule.worst)
    return total, worst


@pytest.mark.parametrize("first", range(0, 60, 20))
async def test_schedules(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    total, _ = await play(range(first, first + 20), monkeypatch)
    missing = {name: total[name] for name in HAPPENED - RARE if not total[name]}
    assert not missing, f"these never happened, so the schedules test too little: {missing}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_five_hundred_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    total, worst = await play(range(1000, 1500), monkeypatch)
    missing = {name: total[name] for name in HAPPENED if total[name] < 10}
    assert not missing, f"these happened in too few schedules: {missing}"
    assert 0 < worst <= TOLERANCE
