"""Every `Grammars` keeps what the scheduler counts on."""

import pytest
from needs import needed

from rollwright.model.tokenizer import PieceTokenizer
from rollwright.testing.grammars import CHECKS, Make, Subject

needed("grammar", module=True)


def guided() -> Subject:
    from rollwright.engine.grammar.guided import GuidedGrammars

    tokenizer = PieceTokenizer(['{"', '"}', '":', "ab", "yes", "éa", "12"], ["<|end|>", "<call>", "</call>"])
    vocabulary = tokenizer.vocabulary()
    return Subject(GuidedGrammars(vocabulary), vocabulary, tokenizer.control("<|end|>"))


@pytest.mark.parametrize("make", [guided])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_grammars(check, make: Make) -> None:  # type: ignore[no-untyped-def]
    check(make)
