"""A feasibility report as text.

Role: what `rollwright assess` prints. Neighbours: `feasibility` has the figures. Invariants: each figure
stands with its interval; a figure without data says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollwright.evals.caps import told as caps_told
from rollwright.evals.feasibility import Feasibility, Figure

NO_DATA = "no data"


def lines(found: Feasibility) -> Iterator[str]:
    """The report, line by line."""
    yield f"{found.tasks} tasks × {found.tries} tries; 95 % intervals are over tasks"
    yield ""
    yield _row("pass@1", _told(found.pass_1, _rate))
    if found.tries > 1:
        yield _row(f"pass@{found.tries}", _told(found.pass_k, _rate))
    yield _row("held-out pass@1", _told(found.heldout, _rate))
    yield _row("variance within a group", _told(found.variance, "{:.3f}".format))
    for name, share in found.shares.items():
        yield _row(f"groups {'with signal' if name == 'signal' else name}", _told(share, _rate))
    if found.unscorable:
        yield _row("rollouts without a score", str(found.unscorable))
    yield _row("tokens a rollout", _told(found.tokens, "{:.0f}".format))
    yield _row("turns a rollout", _told(found.turns, "{:.1f}".format))
    yield _row("seconds a rollout", _told(found.seconds, "{:.2f}".format))
    yield _row("tokens a success", _plain(found.success_tokens, "{:.0f}".format))
    yield _row("wall time a success", _plain(found.success_seconds, _time))
    yield _row("wall time a step, about", _told(found.step_seconds, _time))
    yield _row("wall time a run, about", _told(found.run_seconds, _time))
    critic = {True: "would pay", False: "would not pay", None: NO_DATA}[found.critic.pays]
    yield _row("a critic", f"{critic}: {found.critic.reason}")
    yield ""
    if found.evidence and (found.verdict != "go" or found.warnings):
        yield from found.evidence
        yield ""
    yield from caps_told(found.caps)
    for warning in found.warnings:
        yield f"warning: {warning}"
    yield f"{found.verdict}: {'; '.join(found.reasons)}"


def _row(name: str, text: str) -> str:
    return f"{name:<26}{text}"


def _told(figure: Figure, form: Callable[[float], str]) -> str:
    if figure.value is None:
        return NO_DATA
    if figure.low is None and figure.high is None:
        return f"{form(figure.value)} (no interval)"
    low, high = (NO_DATA if each is None else form(each) for each in (figure.low, figure.high))
    return f"{form(figure.value)} ({low} to {high})"


def _plain(value: float | None, form: Callable[[float], str]) -> str:
    return NO_DATA if value is None else form(value)


def _rate(value: float) -> str:
    return f"{100 * value:.0f} %"


def _time(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
