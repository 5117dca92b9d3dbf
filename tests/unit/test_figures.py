"""Figures and terminal: what a person is shown follows from the events, and nothing is made up."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
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
from rollwright.monitor.plain import clean
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
    assert Terminal(Console(file=io.StringIO()), figures, "t").line() == "starting"
    figures = fed(Metrics(process="rollouts", values={"queue/depth": 0.0}))  # it waits for the first weights
    assert Terminal(Console(file=io.StringIO()), figures, "t").line() == "starting"
    figures = fed(rollout(None))
    assert "–" in Terminal(Console(file=io.StringIO()), figures, "t").line()
    figures = fed(step(4, 0.5), RunStarted(run="r", process="trainer", incarnation=1))
    assert Terminal(Console(file=io.StringIO()), figures, "t").line() == "step 4/10  starting"


def drawn(figures: Figures) -> str:
    out = io.StringIO()
    console = Console(file=out, width=300, force_terminal=True, color_system=None)
    console.print(Terminal(console, figures, "t").panel())
    return out.getvalue()


def test_an_evaluation_shows_how_far_it_is_until_it_is_done() -> None:
    progress = Metrics(
        process="rollouts", values={"evaluate/done": 120, "evaluate/total": 256}, what="after, sampled"
    )
    figures = fed(step(1, 0.1), progress)
    assert "evaluating after, sampled 120/256" in Terminal(Console(file=io.StringIO()), figures, "t").line()
    assert "evaluating after, sampled 120/256" in drawn(figures)
    figures = fed(step(1, 0.1), progress, evaluated("after", 1))
    assert "evaluating" not in Terminal(Console(file=io.StringIO()), figures, "t").line() + drawn(figures)
    assert "starting" in drawn(fed()) and "starting" not in drawn(figures)


def evaluated(label: str, successes: int, **more: object) -> Evaluated:
    return Evaluated(label=label, mode="greedy", successes=successes, trials=10, low=0, high=1, **more)  # type: ignore[arg-type]


def summed(figures: Figures, example: str | None = None) -> str:
    out = io.StringIO()
    Terminal(Console(file=out, width=300), figures, "t").summary(example)
    return out.getvalue()


def test_an_after_of_another_step_than_the_last_says_so() -> None:
    made = [evaluated("before", 1, step=0), evaluated("after", 9, step=12)]
    assert "after (step 12)" in summed(fed(*made, step(24, 0.1)))
    table = summed(fed(*made, step(12, 0.1)))
    assert "after" in table and "(step" not in table
    table = summed(fed(evaluated("after", 9, step=24, incarnation=1), *made, step(24, 0.1)))
    assert "90.0 %" in table and "(step" not in table  # by step, not by place


def test_what_others_measured_is_no_before_and_after_and_takes_no_time() -> None:
    figures = fed(evaluated("before", 1, step=0), evaluated("after", 9, step=10), step(10, 0.1))
    before = figures.seconds
    for event in (
        Metrics(process="rollouts", values={"engine/running": 7.0}),
        evaluated("eval-1", 3, step=10),
    ):
        figures.feed(Logged(9e9, event, "eval-1"))
    assert figures.seconds == before and "engine/running" not in figures.live
    assert "eval-1" not in summed(figures) and figures.evaluations[-1].label == "eval-1"


def test_a_resumed_part_says_nothing_of_a_warm_start_that_it_had_not() -> None:
    assert "warm start" not in summed(fed(step(3, 0.1)))
    assert "warm start 0:05" in summed(fed(Metrics(process="t", values={"warmstart/seconds": 5.0})))


HOSTILE = "\x1b]0;owned\x07\x1b[31m[red]\x9b2J\udcff\u202e"


def test_no_text_of_a_run_is_obeyed_by_the_terminal() -> None:
    figures = fed(
        Noted(level="warning", text=HOSTILE),
        evaluated("after" + HOSTILE, 3),
        evaluated("after", 3),
        GroupEnded(group="g", task="t", kept=False, reason=HOSTILE, mean=None),
        Metrics(process="rollouts", values={}, what=HOSTILE),
    )
    for terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=300, force_terminal=terminal, color_system=None)
        with Terminal(console, figures, HOSTILE) as shown:
            shown.update(0.0)
            figures.evaluating = ""
            shown.update(100.0)
        shown.summary(f"{HOSTILE}\n{HOSTILE}")
        console.print(before_after(figures.evaluations))
        text = out.getvalue()
        assert "[red]" in text and "\\x1b[31m" in text
        assert not any(bad in text for bad in ("\x1b[31m", "\x1b]", "\x07", "\x9b", "\udcff", "\u202e"))


@given(st.text(st.characters()))
def test_cleaned_text_is_printable_and_keeps_what_was(text: str) -> None:
    cleaned = clean(text)
    assert all(line.isprintable() for line in cleaned.split("\n"))
    cleaned.encode()
    if all(c.isprintable() for c in text):
        assert cleaned == text


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
