"""A stop string is found where the text has it, however the tokens cut it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engine.embedded.stops import StopText
from rollwright.model.base import Vocabulary

PIECES = (
    b"a",
    b"b",
    b"ab",
    b"aab",
    b"\n",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9",
    b"\xf0\x9f",
    b"\x98\x80",
    b"",
    b"ba\xc3",
)
CONTROL = {"ab": 12, "<end>": 13}
VOCABULARY = Vocabulary(pieces=(*PIECES, *(name.encode() for name in CONTROL)), control=CONTROL)

stop_strings = st.lists(st.text("ab\né😀", min_size=1, max_size=5), min_size=1, max_size=4)
tokens = st.lists(st.integers(0, len(VOCABULARY.pieces) + 2), max_size=40)


def spelled(ids: list[int]) -> bytes:
    return b"".join(PIECES[id] for id in ids if id < len(PIECES))


def first(ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    """How many tokens the first match takes and which string it is, from the whole text each time."""
    for n in range(1, len(ids) + 1):
        text = spelled(ids[:n])
        if any(stop.encode() in text for stop in stops):
            ends = [
                (text.find(s.encode()) + len(s.encode()), -len(s.encode()), s)
                for s in stops
                if s.encode() in text
            ]
            return n, min(ends)[2]
    return None


def pushed(ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    matcher = StopText(VOCABULARY, stops)
    for n, id in enumerate(ids, 1):
        if (found := matcher.push(id)) is not None:
            return n, found
    return None


@given(ids=tokens, stops=stop_strings)
def test_it_finds_what_the_text_has_at_the_token_that_completes_it(ids: list[int], stops: list[str]) -> None:
    assert pushed(ids, stops) == first(ids, stops)


@given(ids=tokens, stops=stop_strings)
def test_after_one_was_found_the_search_begins_anew(ids: list[int], stops: list[str]) -> None:
    matcher, found, start = StopText(VOCABULARY, stops), [], 0
    for n, id in enumerate(ids, 1):
        if (stop := matcher.push(id)) is not None:
            found.append((start, n, stop))
            start = n
    for begin, end, stop in found:
        assert first(ids[begin:], stops) == (end - begin, stop)
    assert first(ids[start:], stops) is None


@pytest.mark.parametrize(
    ("ids", "stop", "found"),
    [
        ([3], "a", (1, "a")),  # in the middle of a token
        ([2], "b", (1, "b")),
        ([0, 0, 1], "aab", (3, "aab")),  # over three tokens
        ([0, 2], "aab", (2, "aab")),  # the first a may begin it, the second does
        ([5, 6], "é", (2, "é")),  # within a character
        ([8, 9], "😀", (2, "😀")),
        ([5, 9], "é", None),
        ([12], "ab", None),  # a control token's name
        ([13], "end", None),
        ([0, 13, 1], "ab", (3, "ab")),  # no text stands between
        ([0, 99, 1], "ab", (3, "ab")),  # an id without a piece
    ],
)
def test_where_it_lies(ids: list[int], stop: str, found: tuple[int, str] | None) -> None:
    assert pushed(ids, [stop]) == found


def test_of_several_that_end_together_the_longest_is_told() -> None:
    assert pushed([0, 1], ["b", "ab"]) == (2, "ab")
    assert pushed([3], ["aab", "aa"]) == (1, "aa")


@pytest.mark.parametrize("stops", [[], [""], ["a", ""], ["\ud800"]])
def test_what_is_no_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError):
        StopText(VOCABULARY, stops)
