"""Packing: each row once, the budget kept, only what is needed computed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollwright.testing.records import VERSION, make_row, make_sample
from rollwright.trainer.packing import Example, pack, padding_share

patterns = st.text("PSTI", min_size=1, max_size=20).map(lambda body: "P" + body)


def example(pattern: str, seed: int = 0) -> Example:
    """An example whose tokens tell which row they are from."""
    row = make_row(pattern, tokens=[seed * 100 + i for i in range(len(pattern))])
    return Example.of_sample(make_sample(row, 1.0 + seed), VERSION)


@given(st.lists(patterns, min_size=1, max_size=12), st.integers(1, 80))
@settings(max_examples=150, deadline=None)
def test_each_weighted_token_is_predicted_once_within_budget(rows: list[str], budget: int) -> None:
    examples = [example(pattern, seed) for seed, pattern in enumerate(rows)]
    micros = pack(examples, budget)
    expected = [
        (seed * 100 + i - 1, seed * 100 + i)
        for seed, pattern in enumerate(rows)
        for i, letter in enumerate(pattern)
        if letter == "S"
    ]
    found = [pair for m in micros for pair in zip(m.ids[m.keep].tolist(), m.targets.tolist(), strict=True)]
    assert sorted(found) == expected
    for micro in micros:
        assert micro.padded <= budget or len(micro.lengths) == 1
        assert sum(micro.lengths) == len(micro.ids)
        assert micro.weights.bool().all()
        assert (micro.advantages == 1.0 + micro.targets // 100).all()
    if micros:
        lengths = [n for micro in micros for n in micro.lengths]
        assert lengths == sorted(lengths, reverse=True)
        assert 0 <= padding_share(micros) < 1


def test_nothing_behind_the_last_trained_token_is_computed() -> None:
    (micro,) = pack([example("PPSSTTTTTT")], 100)
    assert micro.ids.tolist() == [0, 1, 2]
    assert micro.keep.tolist() == [1, 2]
    assert micro.targets.tolist() == [2, 3]


def test_padding_share_by_hand() -> None:
    micros = pack([example("PPPPPPPPS"), example("PPPPS")], 100)
    assert [m.lengths for m in micros] == [(8, 4)]
    assert padding_share(micros) == 0.25


def test_only_tokens_of_the_consuming_version_are_fresh() -> None:
    row = make_row("PPSSTSS")
    first, second = row.spans
    mixed = replace(row, spans=(first, replace(second, version=VERSION.next())))
    (micro,) = pack([Example.of_sample(make_sample(mixed), VERSION.next())], 100)
    assert micro.fresh.tolist() == [False, False, True, True]


def test_a_demonstration_has_weight_where_sampled() -> None:
    made = Example.of_row(make_row("PPSTSI"), "demo")
    assert made.weights.tolist() == [0, 0, 1, 0, 1, 0]


BAD = {
    "first token": (example("SPS"), "predicts"),
    "too long": (example("P" * 40 + "S"), "context is 32"),
    "vocabulary": (example("PS", seed=9), "vocabulary"),
    "weight": (
        Example.of_sample(make_sample(make_row("PS"), weight=-1.0), VERSION),
        "negative",
    ),
    "advantage": (
        Example.of_sample(make_sample(make_row("PS"), np.nan), VERSION),
        "advantage is not finite",
    ),
    "logprob": (
        Example.of_sample(make_sample(make_row("PS", logprobs=[0, -np.inf])), VERSION),
        "logprob is not finite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_would_train_wrong_is_refused_by_name(case: str) -> None:
    bad, text = BAD[case]
    with pytest.raises(ValueError, match=text) as caught:
        bad.check(context=32, vocab=500)
    assert "rollout g0/0" in str(caught.value)
