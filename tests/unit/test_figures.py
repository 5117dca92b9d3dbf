"""Figures and terminal: what a person is shown follows from the events, and nothing is made up."""

from __future__ import annotations

import io

from rich.console import Console

from rollwright.events import (
    Evaluated,
    Event,
    GroupEnded,
    Logged,
    Metrics,
    Noted,
    Resumed,
    RolloutEnded,
    RunStarted,
    StepEnded,
)
from rollwright.monitor.figures import Figures
from rollwright.monitor.terminal import Terminal, before_after, spark


def fed(*events: Event, seconds: float = 1.0) -> Figures:
    figures = Figures(total_steps=10)
    for i, event in enumerate(events):
        figures.feed(Logged(100.0 + i * seconds, event))  # type: ignore[arg-type]
    return figures


def step(number: int, reward: float) -> StepEnded:
    return StepEnded(step=number, incarnation=0, metrics={"train/reward": reward, "train/entropy": 0.5})


def rollout(value: float | None, job: str = "train") -> RolloutEnded:
    return RolloutEnded(
        rollout="r",
        group="g",
        task="t",
        outcome="answered",
        value=value,
        turns=1,
        sampled=3,
        seconds=0.1,
        job=job,
    )


def test_without_events_nothing_has_a_value() -> None:
    figures = fed()
    assert figures.success is None and figures.seconds_left is None
    assert "–" in Terminal(Console(file=io.StringIO()), figures, "t").line()


def test_success_is_the_mean_of_scored_training_rollouts_only() -> None:
    assert fed(rollout(1.0), rollout(None), rollout(0.0), rollout(1.0, "eval")).success == 0.5


def test_a_part_that_goes_on_counts_neither_the_pause_nor_the_pace_of_the_one_before() -> None:
    figures = Figures(total_steps=10)
    walls: list[tuple[float, Event]] = [
        (100.0, RunStarted(run="r", process="trainer")),
        (110.0, step(1, 0.1)),
        (120.0, step(2, 0.2)),
        (9000.0, RunStarted(run="r", process="rollouts", incarnation=1)),
        (9001.0, Resumed(step=3, version="policy@1.3")),  # whose event the kill took along
        (9010.0, step(4, 0.2)),
    ]
    for wall, event in walls:
        figures.feed(Logged(wall, event))  # type: ignore[arg-type]
    assert figures.seconds == 20 + 10 and figures.step == 4
    assert figures.seconds_left is None
    figures.feed(Logged(9012.0, step(5, 0.2)))
    assert figures.seconds_left == 10.0


def test_time_left_follows_the_pace_of_steps() -> None:
    figures = fed(step(1, 0.1), step(2, 0.2), step(3, 0.3), seconds=2.0)
    assert figures.seconds_left == 2.0 * 7


def test_groups_are_counted_with_their_reasons() -> None:
    kept = GroupEnded(group="a", task="t", kept=True, reason="", mean=0.5)
    dropped = GroupEnded(group="b", task="t", kept=False, reason="no signal", mean=1.0)
    figures = fed(kept, dropped, dropped)
    assert (figures.groups_kept, figures.groups_dropped) == (1, {"no signal": 2})


def test_without_a_terminal_plain_lines_come_at_a_steady_pace_and_notes_once() -> None:
    out = io.StringIO()
    figures = fed(step(1, 0.25), Noted(level="warning", text="few successes"))
    with Terminal(Console(file=out, width=300), figures, "t") as terminal:
        for now in (0.0, 1.0, 2.0, 20.0):
            terminal.update(now)
    lines = out.getvalue().splitlines()
    assert sum("step 1/10" in line for line in lines) == 2
    assert sum("few successes" in line for line in lines) == 1


def test_the_warm_start_shows_its_own_progress() -> None:
    figures = fed(Metrics(process="trainer", values={"warmstart/step": 3, "warmstart/total": 9}))
    assert "warm start 3/9" in Terminal(Console(file=io.StringIO()), figures, "t").line()


def test_before_and_after_stand_side_by_side() -> None:
    made = [
        Evaluated(label=label, mode="greedy", successes=wins, trials=10, low=0.1, high=0.9)
        for label, wins in (("before", 4), ("after", 9))
    ]
    out = io.StringIO()
    Console(file=out, width=120).print(before_after(made))
    assert "40.0 %" in out.getvalue() and "90.0 %" in out.getvalue()
    assert before_after([]) is None


def test_spark_clamps() -> None:
    assert spark([-1.0, 0.0, 1.0, 2.0]) == "  ██"
