"""The template: append-only, and no content becomes a control token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.types import Message

CODEC = PieceTokenizer(["sql SELECT", "bada"], CONTROL)
TEMPLATE = PieceTemplate(CODEC)
CONTROL_IDS = {CODEC.control(name) for name in CONTROL}
SPELLS = st.lists(st.one_of(st.sampled_from(CONTROL), st.text(max_size=4))).map("".join)


def show(ids: np.ndarray) -> list[str]:
    return [CODEC.decode([int(id)]) for id in ids]


def test_a_conversation_looks_as_documented() -> None:
    messages = [Message(role="system", content="bada"), Message(role="user", content="bada")]
    assert show(TEMPLATE.start(messages, ())) == [
        *("<|system|>", "bada", "<|end|>", "<|user|>", "bada", "<|end|>", "<|assistant|>")
    ]
    assert show(TEMPLATE.say_call("sql SELECT")) == ["<call>", "sql SELECT", "</call>", "<|end|>"]
    assert show(TEMPLATE.observation(["bada"], closed=True)) == [
        "<|tool|>",
        "bada",
        "<|end|>",
        "<|assistant|>",
    ]
    assert show(TEMPLATE.say_answer("bada")) == ["bada", "<|end|>"]


@given(st.lists(SPELLS, max_size=3), st.booleans())
def test_content_that_spells_control_pieces_stays_text(contents: list[str], closed: bool) -> None:
    made = TEMPLATE.observation(contents, closed=closed)
    controls = [id for id in made.tolist() if id in CONTROL_IDS]
    expected = [] if closed else ["<|end|>"]
    for _ in contents:
        expected += ["<|tool|>", "<|end|>"]
    assert [CODEC.decode([id]) for id in controls] == [*expected, "<|assistant|>"]
    prompt = TEMPLATE.start([Message(role="user", content="".join(contents))], ())
    assert [CODEC.decode([i]) for i in prompt.tolist() if i in CONTROL_IDS] == [
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]


@given(SPELLS)
def test_what_an_assistant_says_is_read_as_it_was_said(text: str) -> None:
    assert TEMPLATE.text(TEMPLATE.say_answer(text).tolist()) == text
    assert TEMPLATE.text(TEMPLATE.say_call(text).tolist()) == f"<call>{text}</call>"


def test_a_stop_token_inside_a_turn_and_an_unfinished_turn_are_kept() -> None:
    end = CODEC.control("<|end|>")
    assert TEMPLATE.text([end, *CODEC.encode("bada")]) == "<|end|>bada"
    assert TEMPLATE.text([]) == ""
    assert TEMPLATE.stop == (end,)


@pytest.mark.parametrize("closed", [True, False])
def test_ids_are_int32(closed: bool) -> None:
    assert TEMPLATE.observation([], closed=closed).dtype == np.int32
    assert TEMPLATE.start([], ()).dtype == np.int32
