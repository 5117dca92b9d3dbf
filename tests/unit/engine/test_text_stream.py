"""Token ids as pieces of text: whole characters, no part of a stop string, nothing lost."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engine.text import TextStream

BYTES = [bytes([i]) for i in range(256)]


def cut(text: str, stops: list[str]) -> str:
    """`text` before its first stop string, looked for the slow way."""
    for end in range(1, len(text) + 1):
        if found := max((len(stop) for stop in stops if text[:end].endswith(stop)), default=0):
            return text[: end - found]
    return text


def pieces(stream: TextStream, data: bytes, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({each % (len(data) + 1) for each in cuts}), len(data)]
    said = [stream.push(data[a:b]) for a, b in pairwise(edges)]
    return [*said, stream.end()]


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.lists(st.integers(0, 1000)))
def test_the_pieces_are_the_text(data: bytes, cuts: list[int]) -> None:
    assert "".join(pieces(TextStream(BYTES), data, cuts)) == data.decode("utf-8", "replace")


@given(
    st.text("abé", max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 1000), max_size=8),
)
def test_the_text_ends_before_its_first_stop_string_however_it_comes(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = TextStream(BYTES, stop=stops)
    said = pieces(stream, text.encode(), cuts)
    assert "".join(said) == cut(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_out_is_never_part_of_a_stop_string_and_whole_characters(text: str, stops: list[str]) -> None:
    stream, out = TextStream(BYTES, stop=stops), ""
    for byte in text.encode():
        out += stream.push([byte])
        assert cut(text, stops).startswith(out)


def test_nothing_is_held_back_that_no_stop_string_can_claim() -> None:
    stream = TextStream(BYTES, stop=["END"])
    assert [stream.push(b"xE"), stream.push(b"N"), stream.push(b"x"), stream.push(b"E")] == [
        "x",
        "",
        "ENx",
        "",
    ]
    assert stream.end() == "E"


@pytest.mark.parametrize(("ids", "text"), [([300, 104, 301, 105], "hi"), ([301], "")])
def test_control_tokens_give_no_text(ids: list[int], text: str) -> None:
    table = [*BYTES, *[b"<end>"] * 60]
    assert TextStream(table, hidden={300, 301}).push(ids) == text


def test_an_id_that_the_vocabulary_does_not_spell_gives_no_text() -> None:
    stream = TextStream(BYTES)
    assert stream.push([65, 256, 66, 1000]) + stream.end() == "AB"
