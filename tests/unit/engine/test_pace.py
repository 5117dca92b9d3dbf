"""The pace of an engine is what its steps say: against plain arithmetic over all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollwright.engine.pace import HIGHEST, KEPT, LOWEST, WINDOWS, Pace

steps = st.lists(st.tuples(st.sampled_from([0.125, 0.25, 0.5, 1.5]), st.integers(0, 300)), max_size=400)
gaps = st.lists(hnp.arrays(np.float64, st.integers(0, 5), elements=st.floats(1e-5, 100)), max_size=150)


def windows(told: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Busy seconds and tokens of whole windows."""
    found, busy, tokens = [], 0.0, 0
    for seconds, count in told:
        busy, tokens = busy + seconds, tokens + count
        if busy >= 1:
            found.append((busy, tokens))
            busy, tokens = 0.0, 0
    return found[-WINDOWS:]


@given(steps)
def test_rate_and_its_variation_are_those_of_the_last_windows(told: list[tuple[float, int]]) -> None:
    pace = Pace()
    for seconds, tokens in told:
        pace.step(seconds, tokens)
    busy, tokens = np.array(windows(told), np.float64).reshape(-1, 2).T
    if not len(busy):
        assert pace.rate is None and pace.rate_variation is None
        return
    assert pace.rate == pytest.approx(tokens.sum() / busy.sum())
    rates = tokens / busy
    if len(busy) < 2 or not tokens.any():
        assert pace.rate_variation is None
    else:
        assert pace.rate_variation == pytest.approx(rates.std(ddof=1) / rates.mean())


def test_without_data_there_is_no_figure() -> None:
    pace = Pace()
    pace.step(0.5, 10)
    pace.gaps(np.empty(0))
    assert (pace.rate, pace.rate_variation, pace.gap_p99) == (None, None, None)
    pace.step(0.5, 10)
    assert pace.rate == 20 and pace.rate_variation is None, "one window has no variation"


def test_a_steady_engine_has_none_and_a_stalled_one_much() -> None:
    steady, stalled = Pace(), Pace()
    for second in range(20):
        for _ in range(8):
            steady.step(0.125, 8)
            stalled.step(0.125, 8 if second % 2 else 0)
    assert steady.rate_variation == 0
    assert stalled.rate_variation == pytest.approx(1, rel=0.05)


def test_what_is_long_past_is_forgotten() -> None:
    pace = Pace()
    for _ in range(10):
        pace.step(1.0, 1000)
    for _ in range(WINDOWS):
        pace.step(1.0, 10)
    assert pace.rate == 10 and pace.rate_variation == 0
    pace.gaps(np.full(4 * KEPT, 5.0))
    for _ in range(2):
        pace.gaps(np.full(KEPT, 0.01))
    assert pace.gap_p99 == pytest.approx(5, rel=0.05), "a quarter of them is still more than one in a hundred"
    for _ in range(8):
        pace.gaps(np.full(KEPT, 0.01))
    assert pace.gap_p99 == pytest.approx(0.01, rel=0.05)


@given(gaps)
def test_the_gap_is_the_percentile_within_five_percent(told: list[np.ndarray]) -> None:
    pace = Pace()
    for each in told:
        pace.gaps(each)
    seconds = np.concatenate([np.empty(0), *told])
    if not len(seconds):
        assert pace.gap_p99 is None
    else:
        exact = np.percentile(seconds, 99, method="inverted_cdf")
        assert pace.gap_p99 == pytest.approx(exact, rel=0.05)
        assert pace.gap_p99 == pace.gap_p99, "reading changes nothing"


def test_one_in_fifty_stalls_shows_and_one_in_a_thousand_does_not() -> None:
    often, seldom = Pace(), Pace()
    for i in range(5000):
        often.gaps(np.array([1.0 if i % 50 == 0 else 0.02]))
        seldom.gaps(np.array([1.0 if i % 1000 == 0 else 0.02]))
    assert often.gap_p99 == pytest.approx(1, rel=0.05)
    assert seldom.gap_p99 == pytest.approx(0.02, rel=0.05)


def test_an_array_that_is_used_again_and_odd_gaps_do_no_harm() -> None:
    pace, mine = Pace(), np.array([0.5, 0.5])
    pace.gaps(mine)
    mine[:] = 9
    assert pace.gap_p99 == pytest.approx(0.5, rel=0.05)
    for odd, told in ((0.0, LOWEST), (-1.0, LOWEST), (np.inf, HIGHEST)):
        pace = Pace()
        pace.gaps(np.array([odd]))
        assert pace.gap_p99 == pytest.approx(told, rel=0.05)
