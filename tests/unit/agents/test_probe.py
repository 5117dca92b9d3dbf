"""The probe: which templates keep history, and where the others rewrite it."""

from __future__ import annotations

from collections.abc import Sequence

import chat_styles as styles
import pytest
from chat_styles import chat, sentencepiece
from needs import needed

from rollwright.agents.probe import Mode, Verdict, probe, probed, verdict
from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.types import Ints

needed("tokenizers", module=True)

KEEPS, REWRITES = Mode.APPEND_ONLY, Mode.REWRITES
MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}


def look(name: str) -> Verdict:
    return probe(chat(getattr(styles, name)))


@pytest.mark.parametrize(
    ("name", "agents", "people"),
    [
        ("CHATML", KEEPS, KEEPS),
        ("HERMES", KEEPS, KEEPS),
        ("LLAMA", KEEPS, KEEPS),
        ("STRICT", KEEPS, KEEPS),
        ("THINKING", KEEPS, REWRITES),
        ("FORGETFUL", REWRITES, KEEPS),
        ("EMPTY_THOUGHT", REWRITES, REWRITES),
    ],
)
def test_each_style_is_known_for_what_it_does(name: str, agents: Mode, people: Mode) -> None:
    verdict = look(name)
    assert (verdict.mode, verdict.dialogue) == (agents, people)
    assert bool(verdict.findings) == (REWRITES in (agents, people))


def test_tools_before_the_last_question_move_only_when_a_person_asks_again() -> None:
    verdict = probe(chat(styles.MISTRAL, sentencepiece(), variables=MISTRAL))
    assert (verdict.mode, verdict.dialogue) == (KEEPS, REWRITES), verdict.lines()
    (first, *_) = verdict.findings
    assert first.case == "a person speaks again"
    assert first.was.startswith("[AVAILABLE_TOOLS]") and first.now.startswith("[INST]")


def test_it_says_where_and_what() -> None:
    (found,) = look("FORGETFUL").findings
    assert (found.case, found.turn) == ("thinking", 1)
    assert found.was.startswith("<think>") and found.now.startswith("Let me look.")
    lines = look("EMPTY_THOUGHT").lines()
    assert lines[0] == "chat template: rewrites history, so that rollouts are kept in several rows"
    assert "plain, after turn 1, token" in lines[1]
    assert any("more of 9 conversations" in line for line in lines)


def test_it_tells_what_else_a_person_should_know() -> None:
    assert look("LLAMA").notes == (
        "it stamps the date: all of the run is given 2026-03-05",
        "it adds a system message of its own where a task has none",
    )
    assert "behind calls given as structure" in "".join(look("STRICT").notes)
    refusal = "{%- if tools %}{{ raise_exception('No tools here') }}{% endif %}{%- for"
    strict = chat(styles.CHATML.replace("{%- for", refusal, 1))
    assert any("No tools here" in note for note in probe(strict).notes)


def test_what_depends_on_the_history_is_found_even_where_the_text_goes_on() -> None:
    """A template that numbers its turns: each prompt extends the last, but not by what a conversation of
    one turn is given."""
    numbered = styles.CHATML.replace("message.role + '\\n'", "message.role ~ loop.index0 ~ '\\n'")
    verdict = probe(chat(numbered))
    assert verdict.mode is REWRITES
    assert verdict.findings[0].turn in (1, 2)


def test_the_verdict_decides_the_mode() -> None:
    assert not probed(chat(styles.THINKING))[0].rewrites
    template, verdict = probed(chat(styles.FORGETFUL))
    assert template.rewrites and verdict.mode is REWRITES


PIECES = PieceTokenizer(["Here", "Let me look."], CONTROL)


def test_our_own_template_gives_what_the_whole_conversation_gives() -> None:
    found = verdict(PieceTemplate(PIECES), PIECES)
    assert found.mode is found.dialogue is KEEPS and not found.findings
    assert found.lines() == ("chat template: append-only, each turn's prompt goes on from the one before",)


def test_any_template_that_gives_something_else_is_found_out() -> None:
    class Trims(PieceTemplate):
        def observation(self, contents: Sequence[str], *, closed: bool) -> Ints:
            return super().observation([content.rstrip(".") for content in contents], closed=closed)

    found = verdict(Trims(PIECES), PIECES)
    first = found.findings[0]
    assert found.mode is REWRITES and (first.case, first.turn) == ("plain", 1)
    assert first.was.startswith("<|end|>") and first.now.startswith(".")


def test_a_chat_template_is_probed_as_before() -> None:
    template = chat(styles.FORGETFUL)
    assert verdict(template, template.codec) == probe(template)
