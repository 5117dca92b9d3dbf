"""Limits learned from rollouts: the quantile, the margin, and silence where nothing can be known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.evals.caps import LEAST, Cap, Use, advice, caps, settings, told


def uses(
    tokens: list[int], *, cut: int = 0, allowed: int = 512, name: str = "set", tag: str = ""
) -> list[Use]:
    """Rollouts of that many tokens, the last `cut` of them cut by the limit."""
    return [
        Use(
            set=name,
            tags=(("kind", tag),) if tag else (),
            used=(size, 2, 10),
            allowed=(allowed, 8, 64),
            cut=(at >= len(tokens) - cut, False, False),
        )
        for at, size in enumerate(tokens)
    ]


def of(found: list[Cap], limit: str) -> Cap:
    return next(cap for cap in found if cap.limit == limit)


def test_the_suggestion_is_a_quarter_above_the_99th_percentile() -> None:
    found = caps(uses([100] * 98 + [160, 400]))
    tokens = of(found, "max_tokens")
    assert (tokens.p99, tokens.longest, tokens.allowed, tokens.suggested) == (400, 400, 512, 512)
    tokens = of(caps(uses([100] * 990 + [160] * 9 + [400])), "max_tokens")
    assert (tokens.p99, tokens.suggested) == (160, 208)  # 160 × 1.25 = 200, a multiple of 16
    assert (of(found, "max_turns").suggested, of(found, "turn_tokens").suggested) == (3, 16)


def test_a_limit_that_cuts_is_not_lowered() -> None:
    tokens = of(caps(uses([100] * 90 + [512] * 10, cut=10)), "max_tokens")
    assert tokens.suggested is None and tokens.cut == 0.1 and not tokens.lower
    assert "keep or raise" in advice(tokens)
    assert not any("max_tokens" in key for key in settings([tokens]))


@given(st.lists(st.integers(1, 512), min_size=LEAST, max_size=300))
def test_it_never_suggests_more_than_is_allowed_nor_less_than_99_in_100_use(sizes: list[int]) -> None:
    tokens = of(caps(uses(sizes)), "max_tokens")
    assert tokens.suggested is not None and tokens.p99 <= tokens.suggested <= 512
    assert np.mean([size <= tokens.suggested for size in sizes]) >= 0.99


def test_too_few_rollouts_say_nothing() -> None:
    assert caps(uses([100] * (LEAST - 1))) == [] and caps([None]) == [] and list(told([])) == []


def test_kinds_are_apart_and_the_setting_holds_for_all_of_them() -> None:
    found = caps(
        [*uses([100] * 50, tag="short"), *uses([200] * 50, tag="long"), *uses([20] * 50, name="other")]
    )
    kinds = [cap.kind for cap in found if cap.limit == "max_tokens"]
    assert kinds == ["other", "set, kind = long", "set, kind = short"]
    assert "tasks.limits.max_tokens=256" in settings(found)
    one = [replace(cap, suggested=None) if cap.kind == "other" else cap for cap in found]
    assert settings(one) == []


def test_a_person_reads_how_to_take_it_and_that_nothing_was_changed() -> None:
    lines = list(told(caps(uses([100] * 100))))
    assert "set, max_tokens: 100 (longest 100, allowed 512, 0% cut, 100 rollouts): 128 would do" in lines[1]
    assert "--set tasks.limits.max_tokens=128" in lines[-2]
    assert "nothing was changed" in lines[-1] and "evaluations" in lines[-1]


def test_a_rollout_that_infrastructure_ended_does_not_count(
    made_rollouts: list[tuple[Use | None, bool]],
) -> None:
    assert made_rollouts and all((found is None) == (not scorable) for found, scorable in made_rollouts)
    sizes = [found.used for found, _ in made_rollouts if found is not None]
    assert all(turns >= 1 and 0 < turn <= row for row, turns, turn in sizes)


@pytest.fixture
def made_rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Use | None, bool]]:
    from made_run import made_run

    from rollwright.archive.reader import opened
    from rollwright.evals.caps import use

    with opened(made_run(tmp_path_factory.mktemp("run"), 96).rollouts) as archive:
        whole = archive.whole([line.rollout for line in archive.lines()])
        return [
            (
                use(kept.task, kept.scored.rollout),
                kept.scored.rollout.outcome.scorable and bool(kept.scored.rollout.turns),
            )
            for _, kept, _ in whole
        ]
