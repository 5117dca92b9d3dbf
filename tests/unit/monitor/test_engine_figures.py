"""Metrics and words of an engine: differences of counters, and no data where there is none."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from rollwright.engine.base import Health
from rollwright.events import Logged, Metrics, RolloutEnded
from rollwright.monitor.engine import described, told
from rollwright.monitor.figures import Figures
from rollwright.monitor.terminal import Terminal
from rollwright.types import PolicyVersion

IDLE = Health(
    ready=True,
    version=PolicyVersion(run="run", policy="policy", incarnation=0, step=0),
    running=0,
    waiting=0,
    prompt_tokens=0,
    cached_tokens=0,
    sampled_tokens=0,
    steps=0,
    busy_seconds=0.0,
    idle_seconds=0.0,
    kv_tokens=0,
    kv_capacity=100,
)
THEN = replace(IDLE, prompt_tokens=1000, cached_tokens=900, constrained=50, compliant=40)
NOW = replace(
    THEN,
    running=3,
    kv_tokens=25,
    prompt_tokens=1200,
    cached_tokens=1000,
    constrained=60,
    compliant=50,
    rate=1234.4,
    rate_variation=0.052,
    gap_p99=0.0123,
)


def shown(metrics: dict[str, float]) -> tuple[str, str]:
    """The terminal's line and panel of a run whose engine told `metrics`."""
    figures = Figures(total_steps=10)
    ended = RolloutEnded(
        rollout="r",
        group="g",
        task="t",
        outcome="answered",
        value=1.0,
        turns=1,
        sampled=3,
        seconds=0.1,
        job="train",
    )
    for event in (ended, Metrics(process="rollouts", values=metrics)):
        figures.feed(Logged(100.0, event))
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=300, force_terminal=True, color_system=None), figures, "t")
    terminal.console.print(terminal.panel())
    return terminal.line(), " ".join(out.getvalue().split())


def test_ratios_are_of_the_interval_and_not_since_the_start() -> None:
    assert told(NOW, THEN) == pytest.approx(
        {
            "engine/running": 3.0,
            "engine/kv_share": 0.25,
            "engine/hit_rate": 0.5,
            "engine/decode_rate": 1234.4,
            "engine/decode_variation": 0.052,
            "engine/gap_p99_ms": 12.3,
            "engine/compliance": 1.0,
        }
    )


def test_what_has_no_data_is_absent() -> None:
    assert told(IDLE, IDLE) == {"engine/running": 0.0, "engine/kv_share": 0.0}
    assert "engine/kv_share" not in told(replace(IDLE, kv_capacity=0), IDLE), "an engine elsewhere has none"
    assert "engine/compliance" not in told(replace(NOW, constrained=50, compliant=40), THEN)
    none = replace(THEN, constrained=55)
    assert told(none, THEN)["engine/compliance"] == 0.0, "none of five is 0, and said"


def test_the_terminal_shows_all_of_them() -> None:
    line, panel = shown(told(NOW, THEN))
    assert "hits 50 % decode 1,234 tok/s ± 5 % p99 gap 12.3 ms compliance 100 %" in " ".join(line.split())
    for text in ("1,234 tok/s ± 5 %", "p99 gap 12.3 ms", "hits 50 %", "compliance 100 %"):
        assert text in panel


def test_the_terminal_says_where_there_is_no_data() -> None:
    line, panel = shown(told(IDLE, IDLE))
    assert "hits no data decode no data p99 gap no data compliance no data" in " ".join(line.split())
    assert "compliance no data" in panel and "0 tok/s" not in panel


def test_gaps_and_a_first_window_read_well() -> None:
    assert dict(described({"engine/decode_rate": 20.0}))["decode"] == "20 tok/s"
    assert dict(described({"engine/gap_p99_ms": 2345.6}))["p99 gap"] == "2.35 s"
