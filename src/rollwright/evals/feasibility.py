"""Is a task set worth training on with this policy? The arithmetic; numpy only.

Role: from tries at tasks to figures, a verdict and its reasons. Neighbours: `run.assess` makes the tries,
`feasibility_text` tells them. Invariants: each figure carries its 95 % interval where it has one, and is None
where it has no data; tries of one task are not independent, so intervals are over tasks.

Policy gradients over groups learn from differences within a group. So a task set is worth training on where
enough groups have rewards that differ (signal), and where the policy can already do more than it mostly does
(room: pass@k above pass@1).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollwright.evals.caps import Cap
from rollwright.evals.statistics import paired_difference, pass_at_k, wilson

Verdict = Literal["go", "no room", "no signal"]
Kind = Literal["signal", "all right", "all wrong", "incomplete"]

SOLVED = 0.97
"""pass@1 from which there is nothing left to learn."""
SIGNAL = 0.05
"""Share of groups with signal below which a step needs so many groups that training is a waste."""
TURNS = 4.0
"""Mean turns from which a rollout is long enough for a critic to tell good turns from bad ones."""
EXPLAINED = 0.3
"""Share of the variance within groups that the state half-way must explain for a critic to pay."""
TRANSFER = 0.25
"""pass@1 on train tasks minus that on held-out ones beyond which the tasks are learnt by heart."""
_EQUAL = 1e-9


@dataclass(frozen=True)
class Trial:
    """One rollout, as far as the arithmetic asks."""

    value: float | None
    """Its reward; None: unscorable."""
    tokens: int
    """Sampled tokens."""
    turns: int
    seconds: float
    states: tuple[str, ...] = ()
    """What was done and seen up to the end of each turn but the last: equal where two rollouts are in the
    same place."""


@dataclass(frozen=True)
class Plan:
    """What training would ask for, and how fast the tries went."""

    group_size: int
    groups: int
    steps: int
    overlap: bool
    """Sampling and training at once (mode `async`)."""
    sampling_seconds: float
    """Wall seconds that all tries took."""
    training_seconds: float | None
    """Wall seconds of one optimiser step; None: not measured."""


@dataclass(frozen=True)
class Figure:
    """An estimate with its 95 % interval; all None where there is no data, no interval where it has none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Critic:
    """Would a learned value of each turn (a critic) pay, beyond the group's mean as baseline?"""

    pays: bool | None
    """None: not enough data."""
    turn: int
    """The state after this many turns was looked at."""
    explained: float | None
    """Share of the reward's variance within groups that this state explains, corrected for chance."""
    reason: str


@dataclass(frozen=True)
class Feasibility:
    """What `assess` says."""

    verdict: Verdict
    reasons: tuple[str, ...]
    tasks: int
    tries: int
    unscorable: int
    pass_1: Figure
    pass_k: Figure
    shares: dict[Kind, Figure]
    variance: Figure
    """Mean variance of the rewards within a group."""
    tokens: Figure
    turns: Figure
    seconds: Figure
    """Of one rollout, from its first token to its last."""
    success_tokens: float | None
    """Sampled tokens for each success."""
    success_seconds: float | None
    """Wall seconds for each success, at the concurrency of the measurement."""
    step_seconds: Figure
    run_seconds: Figure
    critic: Critic
    heldout: Figure = Figure()
    """pass@1 on held-out tasks."""
    warnings: tuple[str, ...] = ()
    """What is worth a word beside the verdict."""
    evidence: tuple[str, ...] = ()
    """How rollouts ended, and a failed one, line by line."""
    caps: tuple[Cap, ...] = ()
    """What the tries used of the tasks' limits, and the limits that would do: a suggestion."""


def feasibility(
    groups: Sequence[Sequence[Trial]], plan: Plan, *, success: float = 1.0, least: int = 2
) -> Feasibility:
    """The figures of `groups` (one list of tries a task) and the verdict. `success`: value that counts as
    one; `least`: scored tries that a group needs.

    Raises:
        ValueError: no tries.
    """
    trials = [trial for group in groups for trial in group]
    if not trials:
        raise ValueError("no tries: nothing can be said about a task set that was not tried")
    tries = max(len(group) for group in groups)
    wins = [[value >= success - _EQUAL for value in _values(group)] for group in groups]
    kinds = Counter(kind(group, success, least) for group in groups)
    names: tuple[Kind, ...] = ("signal", "all right", "all wrong", "incomplete")
    shares = {name: _share(kinds[name], len(groups)) for name in names}
    pass_1 = mean([sum(won) / len(won) for won in wins if won], rate=True)
    pass_k = mean([pass_at_k(len(won), sum(won), tries) for won in wins if len(won) == tries], rate=True)
    won = sum(map(sum, wins))
    step = _step_seconds(shares["signal"], len(trials), plan)
    verdict, reasons = judge(pass_1, pass_k, kinds, tries, plan)
    return Feasibility(
        verdict=verdict,
        reasons=reasons,
        tasks=len(groups),
        tries=tries,
        unscorable=sum(trial.value is None for trial in trials),
        pass_1=pass_1,
        pass_k=pass_k,
        shares=shares,
        variance=mean([float(np.var(v, ddof=1)) for v in map(_values, groups) if len(v) > 1]),
        tokens=mean([_average(trial.tokens for trial in group) for group in groups if group]),
        turns=mean([_average(trial.turns for trial in group) for group in groups if group]),
        seconds=mean([_average(trial.seconds for trial in group) for group in groups if group]),
        success_tokens=sum(trial.tokens for trial in trials) / won if won else None,
        success_seconds=plan.sampling_seconds / won if won else None,
        step_seconds=step,
        run_seconds=Figure(*(None if each is None else each * plan.steps for each in _triple(step))),
        critic=critic(groups),
    )


def transfer(found: Feasibility, heldout: Sequence[Sequence[Trial]], success: float = 1.0) -> Feasibility:
    """`found` with what tries at held-out tasks say: a warning where train tasks are solved and those aren't,
    beyond what their intervals leave open."""
    wins = [[value >= success - _EQUAL for value in _values(group)] for group in heldout]
    figure = mean([sum(won) / len(won) for won in wins if won], rate=True)
    train, warnings = found.pass_1, found.warnings
    if train.value is not None and figure.value is not None:
        apart = train.low is not None and figure.high is not None and train.low > figure.high
        if apart and train.value - figure.value > TRANSFER:
            warnings += (
                f"train tasks are solved at {train.value:.0%}, held-out ones at {figure.value:.0%}: what is "
                "learnt does not carry over; let words recur, and hold out combinations",
            )
    return replace(found, heldout=figure, warnings=warnings)


def kind(group: Sequence[Trial], success: float, least: int) -> Kind:
    """What a group of tries would be to training."""
    values = _values(group)
    if len(values) < least:
        return "incomplete"
    if max(values) - min(values) > _EQUAL:
        return "signal"
    return "all right" if min(values) >= success - _EQUAL else "all wrong"


def judge(
    pass_1: Figure, pass_k: Figure, kinds: Counter[Kind], tries: int, plan: Plan
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and what it rests on."""
    groups, signal = kinds.total(), kinds["signal"]
    if kinds["incomplete"] == groups or pass_1.value is None:
        return "no signal", ("no group had enough scorable rollouts: see what ended them",)
    share = signal / groups
    seen = f"{signal} of {groups} groups have rewards that differ ({share:.0%})"
    gap = None if pass_k.value is None else pass_k.value - pass_1.value
    best = "" if pass_k.value is None else f"pass@{tries} is {pass_k.value:.2f}, pass@1 {pass_1.value:.2f}"
    if pass_1.value >= SOLVED:
        solved = f"pass@1 is {pass_1.value:.2f}, and {SOLVED:.2f} counts as solved: take harder tasks"
        return "no room", (solved, seen)
    if share >= SIGNAL:
        needed = math.ceil(plan.groups / share)
        return "go", tuple(filter(None, (seen, best, f"a step of {plan.groups} groups tries {needed} tasks")))
    if kinds["all wrong"] >= kinds["all right"]:
        wrong = f"{kinds['all wrong']} of {groups} groups are all wrong"
        mend = "more or better demonstrations, a longer warm start, or easier tasks first"
        return "no signal", (wrong, seen, mend)
    same = "sampling again finds nothing that the policy does not do anyway"
    return "no room", tuple(filter(None, (seen, best if gap is not None else "", same)))


def critic(groups: Sequence[Sequence[Trial]]) -> Critic:
    """Whether a critic would pay. It rests on two figures: how long rollouts are, and how much of the
    difference in reward between rollouts of one task is decided by the state half-way. The group's mean
    knows the task only; a critic knows the state too."""
    turns = _average(trial.turns for group in groups for trial in group)
    turn = max(1, round(turns / 2))
    share = explained(groups, turn)
    if share is None:
        return Critic(
            None, turn, None, f"too few rollouts share a state after turn {turn} and differ in reward"
        )
    seen = f"the state after turn {turn} explains {share:.0%} of the variance within groups"
    if turns < TURNS:
        short = f"rollouts take {turns:.1f} turns, fewer than {TURNS:g}: the group's mean is baseline enough"
        return Critic(False, turn, share, f"{short} ({seen})")
    if share < EXPLAINED:
        return Critic(False, turn, share, f"{seen}, less than {EXPLAINED:.0%}: what comes after decides")
    return Critic(True, turn, share, f"{seen}, in rollouts of {turns:.1f} turns with one reward at the end")


def explained(groups: Sequence[Sequence[Trial]], turn: int) -> float | None:
    """1 − (variance of the reward within states) / (variance within groups), 0 to 1, over rollouts that are
    still going after `turn` turns; None with fewer than 8 degrees of freedom within states, or no variance.

    Both variances divide by their degrees of freedom, so states of one rollout explain nothing.
    """
    within, total, free_within, free_total = 0.0, 0.0, 0, 0
    for group in groups:
        alive = [
            (t.states[turn - 1], t.value) for t in group if t.value is not None and len(t.states) >= turn
        ]
        states: dict[str, list[float]] = defaultdict(list)
        for state, value in alive:
            states[state].append(value)
        if len(alive) > 1:
            total += _squares([value for _, value in alive])
            free_total += len(alive) - 1
            within += sum(_squares(values) for values in states.values())
            free_within += len(alive) - len(states)
    if free_within < 8 or total <= _EQUAL:
        return None
    return min(1.0, max(0.0, 1.0 - (within / free_within) / (total / free_total)))


def mean(values: Sequence[float], *, rate: bool = False) -> Figure:
    """Mean over tasks with its 95 % interval. `rate`: values are shares; where all are 0 or all are 1 a
    resampling sees no variance, and Wilson's interval for that many tasks stands instead."""
    if not values:
        return Figure()
    estimate = float(np.mean(values))
    if rate and (max(values) <= 0.0 or min(values) >= 1.0):
        low, high = wilson(round(estimate) * len(values), len(values))
        return Figure(estimate, low, high)
    if len(values) < 2:
        return Figure(estimate)
    found = paired_difference([0.0] * len(values), values)
    return Figure(found.estimate, found.low, found.high)


def _share(count: int, of: int) -> Figure:
    low, high = wilson(count, of)
    return Figure(count / of, low, high)


def _step_seconds(signal: Figure, trials: int, plan: Plan) -> Figure:
    """Seconds of one optimiser step: sampling until `groups` groups have signal, and training."""
    if not signal.value or plan.training_seconds is None:
        return Figure()
    rollout = plan.sampling_seconds / trials

    def seconds(share: float) -> float:
        sampling = plan.groups * plan.group_size * rollout / share
        training = plan.training_seconds or 0.0
        return max(sampling, training) if plan.overlap else sampling + training

    return Figure(
        seconds(signal.value),
        seconds(signal.high or signal.value),
        seconds(signal.low) if signal.low else None,
    )


def _triple(figure: Figure) -> tuple[float | None, float | None, float | None]:
    return figure.value, figure.low, figure.high


def _values(group: Sequence[Trial]) -> list[float]:
    return [trial.value for trial in group if trial.value is not None]


def _average(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _squares(values: Sequence[float]) -> float:
    """Sum of squared differences from the mean."""
    return float(np.var(values) * len(values))
