"""Any text comes back, no text becomes control, and the table is what it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, SchemaError
from rollwright.model.tokenizer import BYTES, PieceTokenizer

CONTROL = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<call>", "</call>", "<|pad|>")
PIECES = ("SELECT", "SELECT *", " FROM", " WHERE", "é", "ééé", "<call", "|end|>")
TOKENIZER = PieceTokenizer(PIECES, CONTROL)

words = st.sampled_from([*CONTROL, *PIECES, " ", "<", "\x00", "naïve", "日本", "SELE"])
texts = st.one_of(st.text(), st.lists(words).map("".join))


@given(texts)
def test_text_round_trips_and_never_becomes_control(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(id < BYTES + len(PIECES) for id in ids)


@given(st.lists(st.text(min_size=1)), texts)
def test_text_round_trips_whatever_the_pieces(pieces: list[str], text: str) -> None:
    tokenizer = PieceTokenizer(pieces, CONTROL)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) <= len(text.encode())
    assert all(tokenizer.decode([tokenizer.control(name)]) == name for name in CONTROL)


@given(st.lists(st.integers(0, TOKENIZER.size - 1)))
def test_any_ids_decode_to_text_that_can_be_stored(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids).encode().decode() == TOKENIZER.decode(ids)


def test_the_longest_piece_wins() -> None:
    assert TOKENIZER.encode("SELECT *") == [BYTES + 1]
    assert TOKENIZER.encode("SELECT x") == [BYTES, ord(" "), ord("x")]
    assert TOKENIZER.encode("SELE") == list(b"SELE")


def test_a_piece_spelt_like_control_is_another_id() -> None:
    tokenizer = PieceTokenizer(["<call>"], ["<call>"])
    assert tokenizer.encode("<call>") == [BYTES] != [tokenizer.control("<call>")]


def test_repeats_and_single_bytes_get_no_id() -> None:
    assert PieceTokenizer(["ab", "a", "ab", "\n"], ["<x>"]).size == BYTES + 2


def test_ids_outside_the_table_are_refused() -> None:
    for ids in ([TOKENIZER.size], [-1], [3, TOKENIZER.size, 3]):
        with pytest.raises(ValueError, match="token ids are"):
            TOKENIZER.decode(ids)


def test_an_unknown_control_piece_is_named_with_those_known() -> None:
    with pytest.raises(ConfigError, match="<call>"):
        TOKENIZER.control("<cal>")


@pytest.mark.parametrize(("pieces", "control"), [([""], []), (["ab"], [""]), ([], ["<x>", "<x>"])])
def test_tables_that_cannot_work_are_refused(pieces: list[str], control: list[str]) -> None:
    with pytest.raises(ConfigError):
        PieceTokenizer(pieces, control)


@given(st.lists(st.text(min_size=1)), st.lists(st.text(min_size=1), unique=True))
def test_the_stored_table_gives_the_same_tokenizer(pieces: list[str], control: list[str]) -> None:
    tokenizer = PieceTokenizer(pieces, control)
    again = PieceTokenizer.from_json(tokenizer.to_json())
    assert again.fingerprint() == tokenizer.fingerprint()
    assert (again.pieces, again.control_pieces) == (tokenizer.pieces, tokenizer.control_pieces)


def test_another_table_has_another_fingerprint() -> None:
    tables = [
        (PIECES, CONTROL),
        (PIECES[::-1], CONTROL),
        (PIECES, CONTROL[:-1]),
        (("ab", "<x>"), ()),
        (("ab",), ("<x>",)),
    ]
    assert len({PieceTokenizer(*table).fingerprint() for table in tables}) == len(tables)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema":1,"pieces":[1],"control":[]}', '{"schema":99,"pieces":[],"control":[]}']
)
def test_a_damaged_table_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        PieceTokenizer.from_json(text)
