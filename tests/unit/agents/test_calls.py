"""The parser: any text gives plain text, calls or malformed calls with a reason, and nothing else."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollwright.agents.calls import ParsedTurn, parse, render
from rollwright.types import ToolCall, ToolSpec
from rollwright.wire import decode, encode


def spec(name: str, **properties: str) -> ToolSpec:
    return ToolSpec(
        name=name,
        description="",
        parameters={
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": list(properties),
        },
    )


SPECS = (
    spec("sql", query="string"),
    spec("write_file", path="string", text="string"),
    spec("wait", s="number"),
)


def parsed(text: str, *, cut: bool = False) -> ParsedTurn:
    return parse(text, SPECS, rollout="g0/1.0", turn=2, cut=cut)


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("<call>sql SELECT 1</call>", "sql", {"query": "SELECT 1"}),
        ("<call>  sql\n SELECT 1 \n</call>", "sql", {"query": "SELECT 1"}),
        ('<call>sql {"query": "SELECT 1"}</call>', "sql", {"query": "SELECT 1"}),
        ("<call>sql SELECT '</call' || 1</call>", "sql", {"query": "SELECT '</call' || 1"}),
        ("let me see <call>sql SELECT 1</call> done", "sql", {"query": "SELECT 1"}),
        ("<call>sql</call>", "sql", {}),
        ("<call>sql {}</call>", "sql", {}),
        ('<call>write_file {"path": "a", "text": "b"}</call>', "write_file", {"path": "a", "text": "b"}),
        ("<call>nosuch thing</call>", "nosuch", {"text": "thing"}),
        ('<call>nosuch {"a": 1}</call>', "nosuch", {"a": 1}),
    ],
)
def test_a_call_is_read(text: str, name: str, arguments: dict[str, object]) -> None:
    (found,) = parsed(text).calls
    assert (found.problem, found.call.name, found.call.arguments) == ("", name, arguments)
    assert found.call.id == "g0/1.0/2/0"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<call></call>", "no tool name"),
        ("<call>   </call>", "no tool name"),
        ('<call>{"name": "sql"}</call>', "not a tool name"),
        ("<call>sql SELECT 1", "missing"),
        ("<call>", "missing"),
        ("SELECT 1</call>", "without <call>"),
        ("<call>sql <call>sql SELECT 1</call></call>", "inside"),
        ("<call>sql <call>sql SELECT 1</call>", "missing"),
        ('<call>sql {"query": </call>', "not valid JSON"),
        ('<call>sql {"query": NaN}</call>', "not valid JSON"),
        ('<call>sql "{\\"query\\": \\"SELECT 1\\"}"</call>', "JSON string"),
        ("<call>sql [1, 2]</call>", "JSON list"),
        ("<call>sql 5</call>", "JSON number"),
        ("<call>sql null</call>", "JSON null"),
        ('<call>sql {"query": 123456789012345678901234567890}</call>', "cannot be stored"),
        ('<call>sql {"query": "\\ud800"}</call>', "cannot be stored"),
        ('<call>sql {"a":' + "[" * 100_000 + "</call>", "not valid JSON"),
        ("<call>write_file a b</call>", "JSON object"),
        ("<call>wait soon</call>", "JSON object"),
    ],
)
def test_a_malformed_call_has_a_reason_and_no_tool(text: str, problem: str) -> None:
    calls = parsed(text).calls
    assert problem in calls[0].problem
    assert (calls[0].call.name, calls[0].call.arguments) == ("", {})
    assert len(f"error: {calls[0].problem}") <= 80


@pytest.mark.parametrize("text", ["<call>sql SELECT 1", "I will <cal", "<c", "<call"])
def test_a_call_cut_by_length_is_never_a_finished_one(text: str) -> None:
    (found,) = parsed(text, cut=True).calls
    assert found.problem == "call cut at the token limit"


@pytest.mark.parametrize(
    "text", ["", "bada", "<", "a < b", "<calls>", "<Call>sql</Call>", "<call >sql</call >"]
)
def test_text_without_a_call_is_plain(text: str) -> None:
    assert parsed(text) == ParsedTurn(text=text)
    assert parsed(text, cut=True).calls == ()


def test_calls_keep_their_order_and_one_bad_call_spoils_no_other() -> None:
    calls = parsed("<call>sql A</call> x <call></call><call>sql B</call> <call>sql C").calls
    assert [each.call.arguments.get("query") for each in calls] == ["A", None, "B", None]
    assert [bool(each.problem) for each in calls] == [False, True, False, True]
    assert [each.call.id for each in calls] == [f"g0/1.0/2/{i}" for i in range(4)]


FRAGMENTS = st.sampled_from(
    [
        "<call>",
        "</call>",
        "sql ",
        "{",
        "}",
        '"query"',
        ":",
        '"',
        "[",
        "]",
        "1",
        "\\ud800",
        "SELECT 1",
        "<cal",
        "\n",
    ]
)


@settings(max_examples=60)
@given(st.one_of(st.text(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=3))).map("".join)), st.booleans())
@example("<call>sql \ud800</call>", False)
def test_any_text_is_parsed_and_stored(text: str, cut: bool) -> None:
    found = parse(text, SPECS, rollout="r", turn=0, cut=cut)
    if "\ud800" not in text:  # no codec gives a lone surrogate
        assert decode(ParsedTurn, encode(found)) == found
    for each in found.calls:
        assert bool(each.problem) != bool(each.call.name)
        assert len(f"error: {each.problem}") <= 80
        if not each.problem:
            assert encode(each.call)
    if "<call>" in text:
        assert found.calls
    elif "</call>" not in text and not cut:
        assert not found.calls


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.text(max_size=20)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=5,
    ),
    max_size=3,
)


@given(st.one_of(ARGUMENTS, st.text().map(lambda text: {"query": text})))
@example({"query": "<call>x</call>"})
@example({"query": ""})
@example({"query": " 5 "})
@example({"query": '{"a": 1}'})
def test_what_is_rendered_is_read_back(arguments: dict[str, object]) -> None:
    call = ToolCall(id="g0/1.0/2/0", name="sql", arguments=arguments)
    (found,) = parsed(f"<call>{render(call, SPECS[0])}</call>").calls
    assert found.problem == ""
    assert (found.call.name, found.call.arguments) == ("sql", arguments)


HERMES = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>\n{"name": "sql", "arguments": {"query": "1"}}\n</tool_call>', "sql", {"query": "1"}),
        ('<tool_call>{"name": "sql", "arguments": "{\\"query\\": 1}"}</tool_call>', "sql", {"query": 1}),
        ('<tool_call>{"name": "sql", "arguments": ""}</tool_call>', "sql", {}),
        ('<tool_call>{"name": "sql"}</tool_call> <call>sql</call>', "sql", {}),
    ],
)
def test_a_call_between_other_marks_is_one_object(text: str, name: str, arguments: object) -> None:
    (found,) = parse(text, SPECS, rollout="g0/1.0", turn=2, marks=HERMES).calls
    assert (found.problem, found.call.name, found.call.arguments) == ("", name, arguments)


@pytest.mark.parametrize(
    ("text", "cut", "problem"),
    [
        ("<tool_call>sql SELECT 1</tool_call>", False, "a JSON object with name and arguments"),
        ('<tool_call>[{"name": "sql"}]</tool_call>', False, "a JSON object with name and arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', False, "no tool name"),
        ('<tool_call>{"name": "a b"}</tool_call>', False, "not a tool name"),
        ('<tool_call>{"name": "sql", "arguments": [1]}</tool_call>', False, "must be a JSON object"),
        ('<tool_call>{"name": "sql", "arguments": "[1]"}</tool_call>', False, "must be a JSON object"),
        ('<tool_call>{"name": "sql", "arguments": "x"}</tool_call>', False, "must be a JSON object"),
        ('<tool_call>{"name": "sql"}', False, "</tool_call> is missing"),
        ('<tool_call>{"name": "sql"}', True, "cut at the token limit"),
        ("<tool_c", True, "cut at the token limit"),
        ("</tool_call>", False, "without <tool_call>"),
    ],
)
def test_what_is_malformed_between_other_marks(text: str, cut: bool, problem: str) -> None:
    (found,) = parse(text, SPECS, rollout="r", turn=0, cut=cut, marks=HERMES).calls
    assert problem in found.problem


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(['<tool_call>{"name": "sql", "arguments": ', *HERMES, "}"]), st.text(max_size=8)
        ),
        max_size=8,
    ).map("".join),
    st.booleans(),
)
def test_nothing_between_other_marks_is_an_error(text: str, cut: bool) -> None:
    found = parse(text, SPECS, rollout="r", turn=0, cut=cut, marks=HERMES)
    assert decode(ParsedTurn, encode(found)) == found
