"""Masks as bits and as booleans say the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engine.grammar import bits


@given(st.integers(1, 200).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_tokens_go_in_and_come_out(made: tuple[int, set[int]]) -> None:
    size, tokens = made
    mask = bits.of(tokens, size)
    assert mask.dtype == np.uint32 and mask.shape == (bits.words(size),)
    assert bits.tokens(mask, size) == sorted(tokens)
    assert [bits.has(mask, token) for token in range(size)] == [token in tokens for token in range(size)]
    assert all(int(mask[token // 32]) >> token % 32 & 1 for token in tokens)


def test_rows_are_unpacked_at_once() -> None:
    rows = np.stack([bits.of([0, 31, 32], 40), bits.of([39], 40), bits.empty(40)])
    flags = bits.allowed(rows, 40)
    assert flags.shape == (3, 40) and flags.dtype == np.bool_
    assert [np.flatnonzero(row).tolist() for row in flags] == [[0, 31, 32], [39], []]
    assert bits.empty(40, rows=3).shape == rows.shape
