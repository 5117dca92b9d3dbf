"""What a person sees on the terminal while a run goes on, and at its end.

Role: draws `Figures` with rich. Neighbours: the conductor owns the loop and calls `update`. Invariants:
where the output is no terminal, plain lines come at a steady pace; a figure without data is shown as `–`;
text from tasks, policies and tools is shown and never obeyed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollwright.events import Evaluated
from rollwright.monitor.engine import described
from rollwright.monitor.evaluations import ENDS, newest, titled
from rollwright.monitor.figures import Figures
from rollwright.monitor.plain import clean

LINE_SECONDS = 5.0
"""Pace of plain lines where there is no terminal to draw on."""

_BARS = " ▁▂▃▄▅▆▇█"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def _percent(value: float | None) -> str:
    return _number(None if value is None else 100 * value, "{:.0f} %")


def _clock(seconds: float | None) -> str:
    return "–" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def spark(values: Sequence[float], width: int = 48) -> str:
    """`values` in 0..1 as a line of bars; the newest `width`."""
    return "".join(_BARS[round(max(0.0, min(1.0, v)) * 8)] for v in values[-width:])


class Terminal:
    """Shows one run; use as a context manager."""

    def __init__(self, console: Console, figures: Figures, title: str) -> None:
        self.console, self.figures, self.title = console, figures, title
        self._live: Live | None = None
        self._last_line: float | None = None
        self._shown_notes = 0
        self._shown_evaluations = 0

    def __enter__(self) -> Terminal:
        if self.console.is_terminal:
            self._live = Live(self.panel(), console=self.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.__exit__(None, None, None)

    def update(self, now: float) -> None:
        """Draw again; `now` is a monotonic time."""
        for note in self.figures.notes[self._shown_notes :]:
            if note.level in ("info", "fatal"):  # the last line of the command tells what was fatal
                continue
            self.console.print(Text(clean(f"{note.level}: {note.text}"), style="yellow"), soft_wrap=True)
        self._shown_notes = len(self.figures.notes)
        for evaluation in self.figures.evaluations[self._shown_evaluations :]:
            self.console.print(describe(evaluation), soft_wrap=True)
        self._shown_evaluations = len(self.figures.evaluations)
        if self._live:
            self._live.update(self.panel())
        elif self._last_line is None or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self.console.print(Text(self.line()), soft_wrap=True)

    def line(self) -> str:
        """The state in one line."""
        f = self.figures
        if f.evaluating:
            return clean(f"step {f.step}/{f.total_steps}  evaluating {f.evaluating}")
        if not f.told:
            return f"step {f.step}/{f.total_steps}  starting" if f.step else "starting"
        if f.step == 0 and f.warm_total and f.warm < f.warm_total:
            loss, left = f.live.get("warmstart/loss"), f.live.get("warmstart/seconds_left")
            return f"warm start {f.warm}/{f.warm_total}  loss {_number(loss, '{:.3f}')}  left {_clock(left)}"
        return (
            f"step {f.step}/{f.total_steps}  success {_percent(f.success)}  "
            f"reward {_number(f.live.get('train/reward'))}  kept {f.groups_kept}/{self._groups()}  "
            f"tok/s {_number(f.live.get('rollout/tokens_per_second'), '{:.0f}')}"
            f"+{_number(f.live.get('train/tokens_per_second'), '{:.0f}')}  "
            f"idle {_percent(f.live.get('rollout/idle_share'))}+{_percent(f.live.get('train/idle_share'))}  "
            f"lag {_number(f.live.get('train/lag_mean'), '{:.1f}')}  "
            f"queue {_number(f.live.get('queue/depth'), '{:.0f}')}  "
            f"{'  '.join(f'{name} {text}' for name, text in described(f.live))}  "
            f"left {_clock(f.seconds_left)}"
        )

    def _groups(self) -> int:
        return self.figures.groups_kept + sum(self.figures.groups_dropped.values())

    def panel(self) -> RenderableType:
        """The state as a panel."""
        f, live = self.figures, self.figures.live
        table = Table.grid(padding=(0, 2))
        for _ in range(6):
            table.add_column(no_wrap=True)
        if f.warm_total and f.step == 0:
            table.add_row(
                "warm start", f"{f.warm}/{f.warm_total}", "loss", _number(live.get("warmstart/loss"))
            )
        if f.evaluating or not f.told:
            now = clean(f"evaluating {f.evaluating}") if f.evaluating else "starting"
            table.add_row("now", Text(now))
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(f.groups_dropped.items())) or "none"
        table.add_row(
            "step",
            f"{f.step}/{f.total_steps}",
            "left",
            _clock(f.seconds_left),
            "queue",
            _number(live.get("queue/depth"), "{:.0f}"),
        )
        table.add_row(
            "success",
            _percent(f.success),
            "reward",
            _number(live.get("train/reward")),
            "entropy",
            _number(live.get("train/entropy")),
        )
        table.add_row(
            "rollouts",
            f"{_number(live.get('rollout/tokens_per_second'), '{:.0f}')} tok/s",
            "idle",
            _percent(live.get("rollout/idle_share")),
        )
        table.add_row(
            "trainer",
            f"{_number(live.get('train/tokens_per_second'), '{:.0f}')} tok/s",
            "idle",
            _percent(live.get("train/idle_share")),
            "staleness",
            _number(live.get("train/lag_mean"), "{:.1f}"),
        )
        hits, decode, gap, compliance = described(live)
        table.add_row("engine", decode[1], *gap, *hits)
        table.add_row("", "", *compliance)
        table.add_row("groups", f"{f.groups_kept}/{self._groups()} kept", "dropped", Text(clean(dropped)))
        curve = Text("success  " + spark([value for _, value, _ in f.curve]), style="green")
        return Panel(Group(table, curve), title=Text(clean(self.title)), expand=False)

    def summary(self, example: str | None) -> None:
        """Before and after, and one rollout turn by turn."""
        f = self.figures
        table = before_after([e for e in f.evaluations if e.label in ENDS], f.step)
        if table is not None:
            self.console.print(table)
        if f.started is not None and f.last_wall is not None:
            warm = f.live.get("warmstart/seconds")
            spent = "" if warm is None else f" (warm start {_clock(warm)})"
            text = (
                f"took {_clock(f.seconds)}{spent}, "
                f"{f.step} steps, {f.groups_kept} of {self._groups()} groups had a signal"
            )
            self.console.print(Text(text), soft_wrap=True)
        if example:
            label, _, text = example.partition("\n")
            title = Text(clean(f"one rollout of the evaluation '{label}'"))
            self.console.print(Panel(Text(clean(text)), title=title, expand=False))


def describe(evaluation: Evaluated) -> Text:
    """One evaluation in one line."""
    name = clean(f"{evaluation.label:<6} {evaluation.mode:<8}")
    if not evaluation.trials:
        return Text(f"{name} no rollout could be scored", style="yellow")
    share = evaluation.successes / evaluation.trials
    return Text(
        f"{name} {100 * share:5.1f} %  "
        f"(95 % interval {100 * evaluation.low:.1f} to {100 * evaluation.high:.1f}, n = {evaluation.trials})",
        style="cyan",
    )


def before_after(evaluations: Sequence[Evaluated], step: int | None = None) -> Table | None:
    """A table of modes × labels, the newest of each; None without evaluations. `step` is the run's last: what
    was measured at another says at which."""
    if not evaluations:
        return None
    found = newest(evaluations)
    table = Table(title="success on held-out tasks, with 95 % intervals")
    table.add_column("mode")
    labels = list(dict.fromkeys(label for label, _ in found))
    labels.sort(key=lambda label: ENDS.index(label) if label in ENDS else len(ENDS))
    for label in labels:
        titles = dict.fromkeys(titled(e, step) for (other, _), e in found.items() if other == label)
        table.add_column(Text(clean(", ".join(titles))), justify="right")
    for mode in dict.fromkeys(mode for _, mode in found):
        cells = [_share(found.get((label, mode))) for label in labels]
        table.add_row(Text(clean(mode)), *cells)
    return table


def _share(e: Evaluated | None) -> str:
    if e is None or not e.trials:
        return "–"
    return f"{100 * e.successes / e.trials:.1f} % [{100 * e.low:.1f}, {100 * e.high:.1f}]"
