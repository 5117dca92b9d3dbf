"""Does the policy learn? Held-out success before and after, three seeds; and controls that must not learn.

Default: `seedK/sampled/before`, `…/after`, `seedK/greedy/before`, `…/after`, `seedK/entropy/…`, and
`sft-longer/…`: supervised training on the same kind of demonstrations for as long as warm start and RL took
together. `--control`: `shuffled/greedy/gain` (rewards dealt out anew within each group),
`no-tool/over-chance` (the trained policy without its tool, against the best guess that needs none).
`--tasks atlas`: the example on real data instead, `atlas/seedK/…` as above, `atlas/sampled/gain` over all
seeds (its spread: a 95 % interval of the difference of two shares), and the longest run in minutes.
`--sandbox NAME` (without the flags above): the whole run with that backend against `process`, in turns:
`sandbox-NAME/success` (difference of the sampled success after training, with its 95 % interval),
`sandbox-NAME/wall` and `…/rl-wall` (of the whole run, and without the warm start), over that of `process`.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

from harness import ATLAS, EXAMPLE, Cases, Trained, parser, train

from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.evals.statistics import wilson
from rollwright.events import Evaluated
from rollwright.plugins import buildable
from rollwright.run.evaluation import evaluate
from rollwright.types import AnswerEquals

SEEDS = (0, 1, 2)


def record(cases: Cases, name: str, run: Trained, labels: tuple[str, ...] = ("before", "after")) -> None:
    """Add a run's success with its 95 % intervals, and its entropy."""
    for mode in ("sampled", "greedy"):
        for label in labels:
            found = run.evaluation(label, mode)
            cases.add(
                f"{name}/{mode}/{label}",
                found.successes / found.trials,
                low=found.low,
                high=found.high,
                unit="success",
            )
    if run.figures.curve:
        for label, (_, _, entropy) in (("first", run.figures.curve[0]), ("last", run.figures.curve[-1])):
            cases.add(f"{name}/entropy/{label}", entropy, unit="nats per token")


def learning(cases: Cases, overrides: list[str], quick: bool) -> None:
    """Three seeds, then the same time spent on supervision alone."""
    runs = []
    for seed in SEEDS[:1] if quick else SEEDS:
        runs.append(train([f"seed={seed}", f"tasks.seed={seed}", *overrides], quick))
        record(cases, f"seed{seed}", runs[-1])
    share = 1 + runs[0].rl_seconds() / runs[0].warm_seconds()
    steps = round(runs[0].figures.warm_total * share)
    longer = train(["seed=0", *overrides], quick, [f"warmstart.steps={steps}", "loop.steps=0"])
    record(cases, "sft-longer", longer, labels=("after",))
    cases.add("sft-longer/time", share, unit="× the warm start")


def atlas(cases: Cases, overrides: list[str], quick: bool, seeds: int) -> None:
    """Countries and cities that training never names: success after the warm start and after RL."""
    runs = []
    for seed in SEEDS[: 1 if quick else seeds]:
        runs.append(train([f"seed={seed}", f"tasks.seed={seed}", *overrides], quick, example=ATLAS))
        record(cases, f"atlas/seed{seed}", runs[-1])
    for mode in ("sampled", "greedy"):
        before, after = (
            pooled([run.evaluation(label, mode) for run in runs]) for label in ("before", "after")
        )
        gain, low, high = difference(before, after)
        cases.add(
            f"atlas/{mode}/gain",
            after[0] / after[1],
            before[0] / before[1],
            ratio=gain,
            low=low,
            high=high,
            unit="success",
        )
    minutes = [run.seconds / 60 for run in runs]
    cases.add("atlas/minutes", max(minutes), low=min(minutes), high=max(minutes), unit="minutes")


def compared(cases: Cases, sandbox: str, quick: bool) -> None:
    """The records run with that backend and with bare processes: success after it, and time."""
    sets = {
        sandbox: [f'sandbox.type="{sandbox}"'],
        "process": ['sandbox.type="process"', "sandbox.unsafe=true"],
    }
    runs: dict[str, list[Trained]] = {name: [] for name in sets}
    for seed in SEEDS[:1] if quick else SEEDS:
        for name in sorted(sets, reverse=bool(seed % 2)):
            runs[name].append(train([f"seed={seed}", f"tasks.seed={seed}", *sets[name]], quick))
    after = {
        name: pooled([run.evaluation("after", "sampled") for run in each]) for name, each in runs.items()
    }
    ours, theirs = after[sandbox], after["process"]
    gain, low, high = difference(theirs, ours)
    cases.add(
        f"sandbox-{sandbox}/success",
        ours[0] / ours[1],
        theirs[0] / theirs[1],
        ratio=gain,
        low=low,
        high=high,
        unit=f"success, {sandbox} − process",
    )
    for case, seconds in (
        ("wall", {name: [run.seconds for run in each] for name, each in runs.items()}),
        ("rl-wall", {name: [run.rl_seconds() for run in each] for name, each in runs.items()}),
    ):
        ratios = [one / other for one, other in zip(seconds[sandbox], seconds["process"], strict=True)]
        cases.add(
            f"sandbox-{sandbox}/{case}",
            statistics.median(seconds[sandbox]),
            statistics.median(seconds["process"]),
            ratio=statistics.median(ratios),
            low=min(ratios),
            high=max(ratios),
            unit=f"seconds, {sandbox} / process",
        )


def pooled(found: list[Evaluated]) -> tuple[int, int]:
    """(successes, trials) of several evaluations together."""
    return sum(each.successes for each in found), sum(each.trials for each in found)


def difference(before: tuple[int, int], after: tuple[int, int]) -> tuple[float, float, float]:
    """after − before of two shares with its 95 % interval (Newcombe's, from Wilson's of each)."""
    first, second = wilson(*before), wilson(*after)
    p, q = before[0] / before[1], after[0] / after[1]
    low = q - p - math.hypot(q - second.low, first.high - p)
    return q - p, low, q - p + math.hypot(second.high - q, p - first.low)


def controls(cases: Cases, overrides: list[str], quick: bool) -> None:
    """A reward that says nothing, and a tool that is not there."""
    shuffled = train(['algorithm.type="controls:Shuffled"', *overrides], quick)
    before, after = shuffled.success("before", "greedy"), shuffled.success("after", "greedy")
    cases.add("shuffled/greedy/gain", after, before, ratio=after - before, unit="success")
    trained = train(list(overrides), quick)
    cases.add("trained/greedy/after", trained.success("after", "greedy"), unit="success")
    tasks = load([EXAMPLE]).evaluation.tasks
    without = evaluate(
        trained.folder, ['tasks.type="controls:NoTool"', f"evaluation.tasks={tasks}"], SystemClock()
    )
    best = max(without, key=lambda e: e.successes / e.trials)
    rate, chance = best.successes / best.trials, guessing(trained, best.trials)
    cases.add(
        "no-tool/over-chance",
        rate,
        chance,
        ratio=rate - chance,
        low=best.low - chance,
        high=best.high - chance,
        unit="success",
    )


def guessing(run: Trained, tasks: int) -> float:
    """Success of the best guess that needs no tool: always the same answer, or the name in the question."""
    taskset = buildable(run.folder.load().tasks, "tasks").build()
    answers, echoes = [], 0
    for number in range(tasks):
        task = taskset.task("heldout", number)
        answer = next(check.expected for check in task.checks if isinstance(check, AnswerEquals))
        answers.append(answer)
        echoes += task.messages[-1].content.startswith(answer)
    return max(max(map(answers.count, set(answers))), echoes) / tasks


def main() -> None:
    """Run it."""
    flags = parser("held-out success before and after training")
    flags.add_argument("--control", action="store_true", help="the runs that must not learn")
    flags.add_argument("--tasks", choices=("records", "atlas"), default="records", help="the example")
    flags.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds of the atlas run")
    flags.add_argument(
        "--sandbox", help="backend: compare it with process; or, with --control or atlas, use it"
    )
    chosen = flags.parse_args()
    if chosen.control and chosen.tasks != "records":
        flags.error("--control is a run of records: leave out --tasks")
    sys.path.insert(0, str(Path(__file__).parent))
    overrides = [f'sandbox.type="{chosen.sandbox}"'] if chosen.sandbox else []
    if chosen.tasks == "atlas":
        cases = Cases("learning-atlas")
        atlas(cases, overrides, chosen.quick, chosen.seeds)
    elif chosen.sandbox and not chosen.control:
        cases = Cases(f"learning-sandbox-{chosen.sandbox}")
        compared(cases, chosen.sandbox, chosen.quick)
    else:
        cases = Cases("learning-control" if chosen.control else "learning")
        (controls if chosen.control else learning)(cases, overrides, chosen.quick)
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
