"""The tokenizer of a checkpoint: content gives no control id, bytes come back, equal tables are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_styles import EVERY_NAME, byte_level, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needed

from rollwright.errors import ConfigError, SchemaError
from rollwright.model.hf_tokenizer import HfTokenizer

needed("tokenizers", module=True)

CODECS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}
SPELLS = st.lists(st.one_of(st.sampled_from((*EVERY_NAME, "\ud800")), st.text(max_size=5)), max_size=6).map(
    "".join
)
each = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


@each
@settings(max_examples=100, deadline=None)
@given(text=SPELLS)
def test_text_comes_back_and_no_text_is_a_control_token(codec: HfTokenizer, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text.encode("utf-8", "replace").decode()
    assert not set(ids) & set(codec.controls.values())


@each
def test_a_name_in_template_text_is_its_token_unless_it_is_broken(codec: HfTokenizer) -> None:
    end = codec.control("<|im_end|>")
    assert codec.encode_marked("a<|im_end|>b") == [*codec.encode("a"), end, *codec.encode("b")]
    assert codec.encode_marked("<\ufdd0|im_end|>", barrier="\ufdd0") == codec.encode("<|im_end|>")
    assert codec.encode_marked("") == []
    assert codec.decode([end]) == "<|im_end|>"


@each
def test_the_table_spells_what_is_decoded(codec: HfTokenizer) -> None:
    table = codec.vocabulary()
    assert len(table.pieces) == codec.size
    assert table.control == dict(codec.controls)
    assert {table.pieces[id] for id in table.control.values()} == {name.encode() for name in table.control}
    ids = codec.encode("the quick é 😀")
    assert b"".join(table.pieces[id] for id in ids).decode() == "the quick é 😀"


@each
def test_pieces_of_a_character_come_together(codec: HfTokenizer) -> None:
    ids = codec.encode("😀")
    assert len(ids) == 4
    assert codec.decode(ids[:2]) + codec.decode(ids[2:]) != codec.decode(ids) == "😀"


@each
def test_ids_that_there_are_not(codec: HfTokenizer) -> None:
    """A model pads its vocabulary, and an untrained one samples the padding."""
    assert codec.decode([codec.size + 7]) == "\ufffd"
    with pytest.raises(ValueError, match="not negative"):
        codec.decode([-1])
    with pytest.raises(ConfigError, match="no control token '<x>'"):
        codec.control("<x>")


@each
def test_it_comes_back_from_its_json_and_its_folder(codec: HfTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(codec.to_json(), encoding="utf-8")
    for again in (HfTokenizer.from_json(codec.to_json()), HfTokenizer.from_folder(tmp_path)):
        assert again.fingerprint() == codec.fingerprint()
        assert again.vocabulary() == codec.vocabulary()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        HfTokenizer.from_folder(tmp_path / "none")


def test_the_fingerprint_tells_tables_apart() -> None:
    one, other = byte_level(), byte_level(size=300)
    assert one.fingerprint() != other.fingerprint()
    table = json.loads(one.to_json())
    table["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    cut = HfTokenizer(json.dumps(table))
    assert cut.fingerprint() == one.fingerprint()
    assert len(cut.encode("the quick brown fox" * 9)) > 9, "nothing is cut off"


def test_sentencepiece_begins_a_row_with_a_space_and_only_a_row() -> None:
    codec = sentencepiece()
    first, later = codec.encode_marked("the", begins=True), codec.encode_marked("the")
    assert codec.decode(first) == " the" and codec.decode(later) == "the"
    bos = codec.control("<s>")
    assert codec.encode_marked("<s>the", begins=True) == [bos, *later]


def test_spaces_that_a_control_token_takes_with_it() -> None:
    table = json.loads(byte_level().to_json())
    for added in table["added_tokens"]:
        added["rstrip"] = added["content"] == "<|im_end|>"
        added["lstrip"] = added["content"] == "<|im_start|>"
    codec = HfTokenizer(json.dumps(table))
    assert (
        codec.decode(codec.encode_marked("a <|im_end|> \n b <|im_start|> c")) == "a <|im_end|>b<|im_start|> c"
    )
    from tokenizers import Tokenizer

    text = "a <|im_end|> \n b <|im_start|> c<|im_end|>\n\n<|im_start|>"
    whole = Tokenizer.from_str(codec.to_json()).encode(text, add_special_tokens=False).ids
    assert codec.encode_marked(text) == whole


def test_a_table_whose_model_spells_a_control_token_itself() -> None:
    """Unigram finds `<s>` in its own list."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = [(letter, -3.0) for letter in "abs<>/▁"]
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), *letters], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    made.add_special_tokens([AddedToken("<s>", normalized=False)])
    codec = HfTokenizer(made.to_str())
    ids = codec.encode("a<s>b<s>")
    assert codec.decode(ids) == "a<s>b<s>" and codec.control("<s>") not in ids
    assert codec.encode_marked("<s>") == [codec.control("<s>")]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"added_tokens": [], "model": {"vocab": {}}}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises((SchemaError, ConfigError)):
        HfTokenizer(text)


def test_a_tokenizer_that_does_not_spell_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece is not supported"):
        HfTokenizer(made.to_str())
