"""Constrained walks of any policy end in words of the language; what cannot be held to is refused."""

import json
import re

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import needed

from rollwright.agents.calls import parse
from rollwright.agents.template import CONTROL, END
from rollwright.engine.grammar.guided import GuidedGrammars
from rollwright.errors import ConstraintError
from rollwright.model.base import Vocabulary
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.testing.grammars import Subject, allowed, at_random, walk
from rollwright.types import Json, ToolSpec

needed("grammar", module=True)

PIECES = (
    '{"',
    '"}',
    '":',
    '":"',
    '","',
    "[[",
    "]]",
    "<call",
    "call>",
    "/call",
    "é",
    "日本",
    "12",
    "true",
    "null",
)
TOKENIZER = PieceTokenizer(PIECES, CONTROL)
VOCABULARY = TOKENIZER.vocabulary()
SUBJECT = Subject(GuidedGrammars(VOCABULARY), VOCABULARY, TOKENIZER.control(END))
OPEN, CLOSE = TOKENIZER.control("<call>"), TOKENIZER.control("</call>")

names = st.sampled_from(["a", "b", "city", 'q"uote', "é", "</x>"])


def objects(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Objects with some of their properties required, closed, open or neither."""
    return st.tuples(
        st.dictionaries(names, inner, max_size=4), st.integers(0, 4), st.sampled_from([None, True, False])
    ).map(
        lambda made: (
            {"type": "object", "properties": made[0], "required": sorted(made[0])[: made[1]]}
            | ({} if made[2] is None else {"additionalProperties": made[2]})
        )
    )


def bounded(kind: str, low: str, high: str, least: int, most: int) -> st.SearchStrategy[Json]:
    """Values of a kind with a lower and an upper bound."""
    numbers = st.tuples(st.integers(least, most), st.integers(0, most))
    return numbers.map(lambda both: {"type": kind, low: both[0], high: sum(both)})


leaves = st.one_of(
    bounded("string", "minLength", "maxLength", 0, 5),
    bounded("integer", "minimum", "maximum", -500, 900),
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer"},
            {"type": "number"},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"type": "string", "pattern": "^[a-f]{2,}x?$"},
            {"type": "string", "format": "date"},
            {"type": "integer", "multipleOf": 7},
            {"enum": ["red", "green", 3, None, {"k": [1]}]},
            {"const": 'é"\n'},
            {},
            True,
        ]
    ),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(bounded("array", "minItems", "maxItems", 0, 3), inner).map(
            lambda made: {**made[0], "items": made[1]}
        ),
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda values: {"type": "object", "additionalProperties": values}, inner),
    ),
    max_leaves=6,
)


def shortest(schema: Json) -> int:
    """Tokens of a greedy policy's word with all the budget in the world."""
    matcher = SUBJECT.matcher("json_schema", json.dumps(schema))
    found = SUBJECT.grammars._closing.find(matcher._parser, 100_000)
    assert found is not None
    return len(found)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas, st.integers(0, 2**32), st.integers(0, 120))
def test_a_random_policy_writes_valid_json_within_its_budget(schema: Json, seed: int, more: int) -> None:
    budget = shortest(schema) + 1 + more
    matcher = SUBJECT.matcher("json_schema", json.dumps(schema), budget)
    said = SUBJECT.text(walk(SUBJECT, matcher, at_random(seed), budget)).decode()
    assert matcher.complete, said
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(said)), said


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_without_a_budget_what_is_whole_is_valid(schema: Json, seed: int) -> None:
    matcher = SUBJECT.matcher("json_schema", json.dumps(schema))
    said = SUBJECT.text(walk(SUBJECT, matcher, at_random(seed), 150))
    if matcher.complete:
        assert jsonschema_rs.validator_for(schema).is_valid(json.loads(said)), said


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize("budget", [24, 60, 150])
@pytest.mark.parametrize("seed", range(4))
def test_recursive_schemas_end_in_time(budget: int, seed: int) -> None:
    matcher = SUBJECT.matcher("json_schema", json.dumps(TREE), budget)
    said = SUBJECT.text(walk(SUBJECT, matcher, at_random(seed), budget))
    assert matcher.complete and jsonschema_rs.validator_for(TREE).is_valid(json.loads(said))


def test_a_budget_that_no_word_fits_into_is_left_to_run_out() -> None:
    matcher = SUBJECT.matcher("json_schema", '{"const": "much longer than that"}', 5)
    assert len(walk(SUBJECT, matcher, at_random(0), 5)) == 5
    assert not matcher.complete and not matcher.ended


def test_a_budget_far_away_narrows_nothing() -> None:
    schema = json.dumps({"type": "array", "items": {"type": "string"}})
    free, held = SUBJECT.matcher("json_schema", schema), SUBJECT.matcher("json_schema", schema, 10_000)
    for token in walk(SUBJECT, SUBJECT.matcher("json_schema", schema), at_random(3), 100):
        assert allowed(SUBJECT, free) == allowed(SUBJECT, held)
        free.accept(token)
        held.accept(token)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"not": {"type": "string"}}},
        {"properties": {"a": {"type": "array", "contains": {}}}},
        {"if": {"type": "string"}, "then": {"minLength": 3}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "string", "format": "made-up"},
        {"type": "string", "pattern": "^(?=a)b"},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
        {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"$ref": "http://elsewhere/schema"},
        {"type": "string", "x-guidance": {"lenient": True}},
        False,
        3,
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)
def test_what_cannot_be_enforced_is_refused(schema: Json) -> None:
    with pytest.raises(ConstraintError):
        SUBJECT.matcher("json_schema", json.dumps(schema))


def test_a_refusal_names_the_keyword_and_its_place() -> None:
    with pytest.raises(ConstraintError, match=r"#/properties/a: 'uniqueItems'"):
        SUBJECT.matcher("json_schema", '{"properties": {"a": {"type": "array", "uniqueItems": true}}}')


def test_a_property_may_have_a_keywords_name() -> None:
    source = '{"type": "object", "properties": {"not": {"type": "null"}}, "required": ["not"]}'
    matcher = SUBJECT.matcher("json_schema", source, 30)
    assert json.loads(SUBJECT.text(walk(SUBJECT, matcher, at_random(0), 30))) == {"not": None}


def spec(name: str, properties: dict[str, Json], required: list[str]) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name=name, description="", parameters=schema)


TOOLS = (
    spec("sql", {"query": {"type": "string", "description": "SQL"}}, ["query"]),
    spec(
        "weather.get",
        {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
        ["city", "days"],
    ),
    spec("paint", {"colour": {"enum": ["red", "blue"]}, "size": {"type": "number"}}, ["colour"]),
    spec("now", {}, []),
)
SOURCE = json.dumps([{"name": tool.name, "parameters": tool.parameters} for tool in TOOLS])


def calls(seed: int, budget: int) -> tuple[str, bool]:
    """What a policy that likes calls says, without the stop token, and whether it is whole."""
    matcher = SUBJECT.matcher("tools", SOURCE, budget)
    anything = at_random(seed)

    def choose(may: list[int]) -> int:
        return OPEN if OPEN in may and anything([0, 1]) else anything(may)

    found = walk(SUBJECT, matcher, choose, budget)
    return SUBJECT.text(found).decode(errors="replace"), matcher.complete


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([30, 80, 160]))
def test_calls_parse_and_their_arguments_fit(seed: int, budget: int) -> None:
    said, whole = calls(seed, budget)
    assert whole, said
    for call in parse(said, TOOLS, rollout="r", turn=0).calls:
        assert not call.problem, (call.problem, said)
        schema = next(tool.parameters for tool in TOOLS if tool.name == call.call.name)
        assert jsonschema_rs.validator_for(schema).is_valid(call.call.arguments), said
        assert call.call.arguments.keys() <= schema["properties"].keys()


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_call_of_the_only_tool_ends_within_its_budget(seed: int, least: int) -> None:
    """With a least length only `"}` and the closing mark can come behind the string; without, the string may
    stand as plain text, which quotes do not end."""
    tool = spec("sql", {"query": {"type": "string", "minLength": least}}, ["query"])
    source = json.dumps([{"name": tool.name, "parameters": tool.parameters}])
    matcher, anything = SUBJECT.matcher("tools", source, 150), at_random(seed)
    matcher.accept(OPEN)
    found = [OPEN, *walk(SUBJECT, matcher, anything, 149)]
    said = SUBJECT.text(found).decode(errors="replace")
    assert matcher.complete, said
    (call, *_) = parse(said, [tool], rollout="r", turn=0).calls
    assert not call.problem and len(call.call.arguments["query"]) >= least


def accepts(text: str, kind: str = "tools", source: str = SOURCE) -> bool:
    """Whether `text`, its marks as control tokens, is a whole word."""
    matcher = SUBJECT.matcher(kind, source)
    for part in re.split("(</?call>)", text):
        ids = [TOKENIZER.control(part)] if part in ("<call>", "</call>") else TOKENIZER.encode(part)
        for token in ids:
            if token not in allowed(SUBJECT, matcher):
                return False
            matcher.accept(token)
    return bool(matcher.complete)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("just text, nothing called", True),
        ("", True),
        ('I look. <call>weather.get {"city": "Oslo", "days": 3}</call>', True),
        ('<call>weather.get {"city":"Oslo","days":3}</call> and <call>now</call>', True),
        ("<call>sql SELECT 1 < 2</call>", True),
        ('<call>sql {"query": "SELECT 1 < 2"}</call>', True),
        ("<call>sql 12 + 3</call>", True),
        ("<call>sql 12</call>", False),  # a JSON number, not text
        ("<call>sql true</call>", False),
        ('<call>sql {"other": 1}</call>', False),
        ('<call>weather.get {"city": "Oslo"}</call>', False),  # days are required
        ('<call>weather.get {"city": "Oslo", "days": 10}</call>', False),
        ('<call>weather.get {"city": "Oslo", "days": 3, "x": 1}</call>', False),
        ('<call>weather.get {"city":  "Oslo", "days": 3}</call>', False),  # one space at most
        ('<call>paint {"colour": "green"}</call>', False),
        ("<call>unknown {}</call>", False),
        ("<call>now", False),
    ],
)
def test_which_turns_are_words(text: str, whole: bool) -> None:
    assert accepts(text) is whole


def test_a_string_that_must_not_be_empty_may_stand_as_it_is() -> None:
    """The form that our own tools' demonstrations have."""

    def may(least: int, text: str) -> bool:
        tool = spec("sql", {"query": {"type": "string", "minLength": least}}, ["query"])
        return accepts(text, source=json.dumps([{"name": tool.name, "parameters": tool.parameters}]))

    assert may(1, "<call>sql SELECT 1</call>") and may(1, '<call>sql {"query": "SELECT 1"}</call>')
    assert not may(1, "<call>sql </call>") and not may(1, '<call>sql {"query": ""}</call>')
    assert not may(2, "<call>sql SELECT 1</call>") and may(2, '<call>sql {"query": "ab"}</call>')


@pytest.mark.parametrize("around", ["{}", '<call>sql {{"query": "{}"}}</call>', "<call>sql {}</call>"])
def test_text_tokens_never_spell_a_mark(around: str) -> None:
    before = around.partition("{}")[0].replace("{{", "{")
    for mark in ("<call>", "</call>"):
        matcher = SUBJECT.matcher("tools", SOURCE)
        for part in re.split("(<call>)", before):
            for token in [OPEN] if part == "<call>" else TOKENIZER.encode(part):
                matcher.accept(token)
        if around.endswith("sql {}</call>"):
            matcher.accept(ord("x"))
        for byte in mark[:-1].encode():
            matcher.accept(byte)
        may = allowed(SUBJECT, matcher)
        assert ord(">") not in may and ord("x") in may


def test_the_hermes_form() -> None:
    tokenizer = PieceTokenizer([], ["<tool_call>", "</tool_call>", "<|im_end|>"])
    vocabulary: Vocabulary = tokenizer.vocabulary()
    subject = Subject(GuidedGrammars(vocabulary), vocabulary, tokenizer.control("<|im_end|>"))
    matcher = subject.matcher("tools", SOURCE)
    matcher.accept(tokenizer.control("<tool_call>"))
    for token in tokenizer.encode('\n{"name": "weather.get", "arguments": {"city": "Oslo", "days": 3}}\n'):
        matcher.accept(token)
    matcher.accept(tokenizer.control("</tool_call>"))
    assert matcher.complete


@pytest.mark.parametrize(
    ("tools", "what"),
    [
        ([], "at least one"),
        ([{"parameters": {}}], "a name"),
        ([{"name": "two words"}], "no name"),
        ([{"name": "a", "parameters": {"type": "string"}}], "schema of an object"),
        ([{"name": "a", "parameters": {"properties": {"x": {"const": "</call>"}}}}], "spell"),
        ([{"name": "a", "parameters": {"properties": {"x": {"not": {}}}}}], "tool a/properties/x: 'not'"),
    ],
)
def test_tools_that_cannot_be_held_to(tools: list[Json], what: str) -> None:
    with pytest.raises(ConstraintError, match=what):
        SUBJECT.matcher("tools", json.dumps(tools))


def test_calls_need_their_marks_in_the_vocabulary() -> None:
    vocabulary = PieceTokenizer([], ["<|end|>"]).vocabulary()
    with pytest.raises(ConstraintError, match="this vocabulary has"):
        Subject(GuidedGrammars(vocabulary), vocabulary, 256).matcher("tools", SOURCE)


@pytest.mark.parametrize(
    ("kind", "source", "words", "others"),
    [
        ("regex", r"\d{3}-[a-z]/", ["123-x/"], ["12-x/", "123-x/ "]),
        ("regex", "a/b|é+", ["a/b", "éé"], ["a", ""]),
        ("choice", '["yes", "yes \\"it\\" is", "né/"]', ["yes", 'yes "it" is', "né/"], ["ye", "yes "]),
        ("grammar", 'start: item ("," item)*\nitem: /[0-9]+/', ["1,22", "3"], ["1,", ""]),
    ],
)
def test_kinds(kind: str, source: str, words: list[str], others: list[str]) -> None:
    assert all(accepts(word, kind, source) for word in words)
    assert not any(accepts(word, kind, source) for word in others)


def test_a_token_outside_the_mask_is_refused() -> None:
    for token in (ord("b"), SUBJECT.stop, -1, TOKENIZER.size):
        matcher = SUBJECT.matcher("regex", "ab")
        with pytest.raises(ValueError, match="token"):
            matcher.accept(token)


def test_compiled_constraints_are_kept_and_the_oldest_forgotten() -> None:
    grammars = GuidedGrammars(VOCABULARY, kept=2)
    subject = Subject(grammars, VOCABULARY, SUBJECT.stop)
    for regex in ("a", "b", "a", "c"):
        subject.matcher("regex", regex)
    assert [constraint.source for constraint in grammars._compiled] == ["a", "c"]
