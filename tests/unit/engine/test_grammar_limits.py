"""Constraints that are malformed, too large or allow nothing are refused; matchers at a limit end."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import needed

from rollwright.engine.grammar import bits
from rollwright.engine.grammar.guided import GuidedGrammars
from rollwright.engine.grammar.marks import Marks
from rollwright.engine.grammar.needs import LIMITLESS, Needs
from rollwright.engine.grammar.table import Table
from rollwright.errors import ConstraintError
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.testing.grammars import Subject, allowed, at_random, constraint, walk
from rollwright.types import Json

needed("grammar", module=True)

TOKENIZER = PieceTokenizer(["<call", "ab"], ["<|end|>", "<call>", "</call>"])
VOCABULARY = TOKENIZER.vocabulary()
GRAMMARS = GuidedGrammars(VOCABULARY)
END = TOKENIZER.control("<|end|>")
SUBJECT = Subject(GRAMMARS, VOCABULARY, END)


@pytest.mark.parametrize("more", [-3, -1, 0, 1, 40])
def test_a_model_may_have_fewer_or_more_words_than_the_tokenizer(more: int) -> None:
    matcher = SUBJECT.matcher("regex", "[a-z]+")
    size = bits.words(TOKENIZER.size)
    out = np.full(size + more, 0xFFFFFFFF, np.uint32)
    matcher.mask(out)
    own = bits.empty(TOKENIZER.size)
    matcher.mask(own)
    assert own.any() and (out[:size] == own[: len(out)]).all() and not out[size:].any()


@pytest.mark.parametrize("strange", [-1, TOKENIZER.size, 10**9])
def test_stop_ids_that_are_no_tokens_are_let_be(strange: int) -> None:
    with_it = GRAMMARS.matcher(constraint("regex", "ab?"), (strange, END), 20)
    without = GRAMMARS.matcher(constraint("regex", "ab?"), (END,), 20)
    for token in b"a":
        assert allowed(SUBJECT, with_it) == allowed(SUBJECT, without)
        with_it.accept(token)
        without.accept(token)
    assert END in allowed(SUBJECT, with_it) and allowed(SUBJECT, with_it) == allowed(SUBJECT, without)
    alone = GRAMMARS.matcher(constraint("regex", "ab?"), (strange,), 20)
    alone.accept(ord("a"))
    assert set(allowed(SUBJECT, alone)) == {ord("b")} and alone.complete and not alone.ended


@pytest.mark.parametrize(("kind", "source"), [("regex", "a{0}"), ("grammar", 'start: ""')])
@pytest.mark.parametrize("stop", [(), (END,)])
def test_the_empty_word_alone_has_ended_before_it_begins(
    kind: str, source: str, stop: tuple[int, ...]
) -> None:
    matcher = GRAMMARS.matcher(constraint(kind, source), stop, 10)
    assert matcher.ended and matcher.complete


@pytest.mark.parametrize(
    ("kind", "source", "stop"),
    [
        ("grammar", "start: A\nA: /a/ & /b/", END),
        ("grammar", "start: /a/ & /b/", END),
        ("choice", '["a"]', ord("a")),
        ("regex", "[ab]", ord("a")),
    ],
)
def test_what_no_token_begins_is_refused(kind: str, source: str, stop: int) -> None:
    stops = (ord("a"), ord("b"), stop)
    with pytest.raises(ConstraintError, match=kind):
        GRAMMARS.matcher(constraint(kind, source), stops, 10)


@pytest.mark.parametrize("regex", ["((a{200}){200}){200}b", "((a{60}){60}){60}b"])
def test_expressions_beyond_the_limits_are_refused(regex: str) -> None:
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        SUBJECT.matcher("regex", regex)


@pytest.mark.parametrize("budget", [None, 30, None])
def test_a_limit_met_while_decoding_ends_the_matcher_unfinished(budget: int | None) -> None:
    """Behind its first letters the expression is one that is beyond the limits; the next completion under
    it begins anew, though it shares what is compiled."""
    matcher = SUBJECT.matcher("regex", "x+y((a{200}){200}){200}b|xz", budget)
    for token in b"xxya":
        if not matcher.ended:
            assert token in allowed(SUBJECT, matcher)
            matcher.accept(token)
    assert matcher.ended and not matcher.complete and not allowed(SUBJECT, matcher)
    with pytest.raises(ValueError, match="token"):
        matcher.accept(END)


def test_a_wrong_token_raises_and_ends() -> None:
    matcher = SUBJECT.matcher("regex", "ab+c")
    with pytest.raises(ValueError, match="leaves the constraint"):
        matcher.accept(ord("z"))
    assert matcher.ended and not matcher.complete


def pairs(count: int, key: str) -> Json:
    """Definitions each of which asks for the next one twice."""
    both = {
        "required": lambda ref: {
            "type": "object",
            "properties": {"a": ref, "b": ref},
            "required": ["a", "b"],
        },
        "items": lambda ref: {"type": "array", "prefixItems": [ref, ref], "minItems": 2},
        "anyOf": lambda ref: {"anyOf": [ref, ref]},
        "allOf": lambda ref: {"allOf": [ref, ref]},
    }[key]
    defs = {f"d{i}": both({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$defs": {**defs, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("key", ["required", "items", "anyOf", "allOf"])
def test_definitions_that_double_are_estimated_once_each(key: str) -> None:
    """2^40 walks would not end."""
    assert 1 <= Needs(pairs(40, key)).of(pairs(40, key)) <= LIMITLESS
    SUBJECT.matcher("json_schema", json.dumps(pairs(22, key)))


def test_needs_of_definitions() -> None:
    tree: dict[str, Json] = {
        "$defs": {
            "leaf": {"const": 12345},
            "node": {"anyOf": [{"$ref": "#/$defs/pair"}, {"$ref": "#/$defs/leaf"}]},
            "pair": {
                "type": "array",
                "prefixItems": [{"$ref": "#/$defs/node"}] * 2,
                "minItems": 2,
            },
            "endless": {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1},
        },
        "allOf": [{"$ref": "#/$defs/endless"}, {"$ref": "#/$defs/pair"}],
    }
    needs = Needs(tree)
    assert needs.of(tree["$defs"]["leaf"]) == needs.of(tree["$defs"]["node"]) == 5
    assert needs.of(tree["$defs"]["pair"]) == 2 + 2 * 6
    assert needs.of(tree["$defs"]["endless"]) == LIMITLESS
    assert Needs({}).of({"type": "array", "minItems": 10**15}) == LIMITLESS


def chain(count: int) -> Json:
    """Definitions each of which names the next."""
    defs: dict[str, Json] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**defs, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def test_chains_of_references_and_rules_have_a_bound() -> None:
    """The library follows them on its stack: beyond a few thousand the process would be gone."""
    SUBJECT.matcher("json_schema", json.dumps(chain(200)))
    with pytest.raises(ConstraintError, match="levels"):
        SUBJECT.matcher("json_schema", json.dumps(chain(5000)))
    with pytest.raises(ConstraintError, match="levels"):
        SUBJECT.matcher("grammar", f"start: %json {json.dumps(chain(5000))}")
    rules = "start: r0\n" + "".join(f'r{i}: "b" r{i + 1}\n' for i in range(5000)) + 'r5000: "a"'
    with pytest.raises(ConstraintError, match="lines"):
        SUBJECT.matcher("grammar", rules)
    nested = "".join(f'r{i}: {"(" * 20}"b" r{i + 1}{")?" * 20}\n' for i in range(390))
    with pytest.raises(ConstraintError, match="brackets"):
        SUBJECT.matcher("grammar", "start: r0\n" + nested + 'r390: "a"')


@pytest.mark.parametrize(
    "source",
    [
        '{"type": "object", "minProperties": "3"}',
        '{"enum": 5}',
        '{"properties": []}',
        '{"$ref": 5}',
        '{"type": "array", "minItems": "3"}',
        '{"type": "array", "prefixItems": 4, "minItems": 1}',
        '{"type": "string", "minLength": "3"}',
        '{"type": "integer", "minimum": "3"}',
        '{"type": "integer", "minimum": null, "maximum": []}',
        '{"type": {"a": 1}}',
        '{"anyOf": {"a": 1}}',
        '{"type": "array", "minItems": 1e400}',
        '{"items":' * 900 + "{}" + "}" * 900,
        '{"const": "\ud800"}',
    ],
    ids=lambda source: source[:40].encode("ascii", "replace").decode(),
)
@pytest.mark.parametrize("kind", ["json_schema", "tools", "grammar"])
def test_malformed_schemas_are_refused(kind: str, source: str) -> None:
    whole = {
        "json_schema": source,
        "tools": f'[{{"name": "f", "parameters": {{"properties": {{"a": {source}}}}}}}]',
        "grammar": f"start: %json {source}",
    }[kind]
    with pytest.raises(ConstraintError):
        SUBJECT.matcher(kind, whole)


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
        st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/a", "#/items", "date", "[a"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["type", "properties", "required", "items", "prefixItems", "enum", "const", "$ref", "$defs",
                 "a", "anyOf", "allOf", "oneOf", "minItems", "maxItems", "minLength", "minimum", "maximum",
                 "minProperties", "additionalProperties", "patternProperties", "pattern", "format"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, st.integers(0, 99))
def test_any_json_is_a_constraint_or_refused(value: Json, seed: int) -> None:
    for kind, source in (
        ("json_schema", json.dumps(value)),
        ("choice", json.dumps(value)),
        ("tools", json.dumps([{"name": "f", "parameters": value}])),
        ("grammar", f"start: %json {json.dumps(value)}"),
    ):
        try:
            matcher = SUBJECT.matcher(kind, source, 12)
        except ConstraintError as error:
            assert str(error)
        else:
            walk(SUBJECT, matcher, at_random(seed), 12)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('ab()[]{}|*+?\\&~/"^$.,:0129 \nst%<>é'), max_size=14), st.integers(0, 99))
def test_any_text_is_a_constraint_or_refused(text: str, seed: int) -> None:
    for kind, source in (("regex", text), ("grammar", f"start: {text}"), ("choice", text)):
        try:
            matcher = SUBJECT.matcher(kind, source, 12)
        except ConstraintError as error:
            assert str(error)
        else:
            walk(SUBJECT, matcher, at_random(seed), 12)


def test_only_prefixes_of_marks_are_remembered() -> None:
    marks = Marks(Table(VOCABULARY), (b"<call>", b"</call>"))
    for number in range(500):
        marks.forbidden(b"<%d" % number)
    for at in range(1, 7):
        assert ord(">") in marks.forbidden(b"</call"[:at]) or at < 6
    assert len(marks._found) == 6 and ord(">") in marks.forbidden(b"x<call")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"x-guidance": {"lenient": true}, "type": "string", "format": "made-up"}',
        'start: %json {"x-guidanc\\u0065": {"lenient": true}, "type": "string", "format": "made-up"}',
        'start: %json\n{"items": {"x-guidanc\\u0065": {"l\\u0065nient": true}, "format": "made-up"}}',
        'start: "a" %json{"foo": [{"\\u0078-guidance": {}}]}',
        "start: %json [",
        'start: %json {"type": "array", "uniqueItems": true}',
        "%llguidance {}\nstart: /a/",
        "%import common.INT\nstart: INT",
    ],
)
def test_a_grammar_sets_no_options(grammar: str) -> None:
    with pytest.raises(ConstraintError):
        SUBJECT.matcher("grammar", grammar)


def test_words_that_options_have_are_words_elsewhere() -> None:
    for grammar in ('start: "lenient"', 'start: "x-guidance"', 'start: "a" %json {"const": "x-guidance"}'):
        assert not SUBJECT.matcher("grammar", grammar).ended
