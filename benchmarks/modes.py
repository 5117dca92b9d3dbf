"""Coupled against async: the same numbers of samples and steps, three seeds, success after training.

Cases: `async-coupled/gap` (largest difference of held-out success over seeds and sampling modes), each
seed's own, and the wall time of training in each mode.
"""

from __future__ import annotations

from harness import Cases, parser, train

SEEDS = (0, 1, 2)


def main() -> None:
    """Run it, modes interleaved."""
    chosen = parser("coupled against async").parse_args()
    cases, gaps, seconds = Cases("modes"), [], []
    for seed in SEEDS[:1] if chosen.quick else SEEDS:
        runs = {
            mode: train([f"seed={seed}", f"tasks.seed={seed}", f'mode="{mode}"'], chosen.quick)
            for mode in (("coupled", "async") if seed % 2 else ("async", "coupled"))
        }
        ours, theirs = runs["async"], runs["coupled"]
        for sampling in ("sampled", "greedy"):
            a, c = ours.success("after", sampling), theirs.success("after", sampling)
            gaps.append(a - c)
            cases.add(f"seed{seed}/{sampling}", a, c, ratio=a - c, unit="success, async − coupled")
        seconds.append(ours.rl_seconds() / theirs.rl_seconds())
    worst = max(gaps, key=abs)
    cases.add("async-coupled/gap", worst, ratio=abs(worst), low=min(gaps), high=max(gaps), unit="success")
    middle = sorted(seconds)[len(seconds) // 2]
    cases.add(
        "async-coupled/time",
        middle,
        low=min(seconds),
        high=max(seconds),
        unit="RL wall time, async / coupled",
    )
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
