"""Chat templates: what is content stays content, and turn N+1 goes on from turn N or forks the row."""

from __future__ import annotations

import json

import chat_styles as styles
import pytest
from chat_styles import EVERY_NAME, byte_level, chat, sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needed

from rollwright.agents.chat_jinja import TemplateRefusal
from rollwright.agents.chat_template import ChatTemplate, Rerendering
from rollwright.errors import ConfigError
from rollwright.model.hf_tokenizer import HfTokenizer
from rollwright.types import Message, ToolSpec

needed("tokenizers", module=True)

SPELLS = st.lists(st.one_of(st.sampled_from(EVERY_NAME), st.text(max_size=4)), max_size=5).map("".join)
PIECES = st.lists(
    st.one_of(
        *(st.sampled_from(EVERY_NAME).map(lambda name, i=i: name[:i]) for i in (1, 3)),
        *(st.sampled_from(EVERY_NAME).map(lambda name, i=i: name[i:]) for i in (1, 3)),
        st.sampled_from(["<", ">", "[", "]", "|", " ", "\n", "\ud800", "\ufdd0", "\U0010ffff", "\\ufdd0"]),
        SPELLS,
    ),
    max_size=6,
).map("".join)
SOURCES = ("CHATML", "HERMES", "THINKING", "FORGETFUL", "EMPTY_THOUGHT", "LLAMA", "SQUEEZED")
TEMPLATES = {name: chat(getattr(styles, name)) for name in SOURCES}
TEMPLATES["MISTRAL"] = chat(
    styles.MISTRAL, sentencepiece(), variables={"bos_token": "<s>", "eos_token": "</s>"}
)
LOOK = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})


def user(content: str) -> Message:
    return Message(role="user", content=content)


def controls(codec: HfTokenizer, ids: list[int]) -> list[int]:
    known = set(codec.controls.values())
    return [id for id in ids if id in known]


def heard(content: str) -> str:
    """What UTF-8 can hold of it."""
    return content.encode("utf-8", "replace").decode()


def test_a_conversation_looks_as_its_template_says() -> None:
    template = TEMPLATES["HERMES"]
    prompt = template.start([user("Where is it?")], [LOOK]).tolist()
    function = {"type": "function", "function": {"name": "look", "description": "Looks."}}
    function["function"]["parameters"] = LOOK.parameters  # type: ignore[index]
    assert template.codec.decode(prompt) == (
        f"<|im_start|>system\nTools:\n<tools>\n{json.dumps(function)}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    told = template.observation(["One.", "Two."], closed=True).tolist()
    assert template.codec.decode(told) == (
        "\n<|im_start|>user\n<tool_response>\nOne.\n</tool_response>\n<tool_response>\nTwo.\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    cut = template.observation(["One."], closed=False).tolist()
    assert cut[0] == template.stop[0] == template.codec.control("<|im_end|>")
    assert cut[1:] == template.observation(["One."], closed=True).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(contents=st.lists(PIECES, min_size=2, max_size=4))
def test_no_content_becomes_a_control_token(name: str, contents: list[str]) -> None:
    """Whatever user, system message, tool and tool description say, the control tokens are those of a
    conversation of the same shape that says nothing of the kind."""
    template, codec = TEMPLATES[name], TEMPLATES[name].codec
    tame = ["x"] * len(contents)

    def tokens(said: list[str]) -> tuple[list[int], list[int]]:
        tool = ToolSpec(name="look", description=said[0], parameters={"properties": {said[1]: {}}})
        prompt = template.start([Message(role="system", content=said[0]), user(said[1])], [tool]).tolist()
        return prompt, template.observation(said[1:], closed=False).tolist()

    for wild, plain in zip(tokens(contents), tokens(tame), strict=True):
        assert controls(codec, wild) == controls(codec, plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["CHATML", "HERMES"])
@settings(max_examples=60, deadline=None)
@given(content=PIECES)
def test_content_is_shown_as_it_is(name: str, content: str) -> None:
    template = TEMPLATES[name]
    prompt = template.start([Message(role="system", content="b"), user(content)], ()).tolist()
    assert template.codec.decode(prompt) == (
        f"<|im_start|>system\nb<|im_end|>\n<|im_start|>user\n{heard(content)}<|im_end|>\n<|im_start|>assistant\n"
    )
    told = template.codec.decode(template.observation([content], closed=True).tolist())
    assert heard(content) in told


def test_ordinary_content_gives_the_tokens_that_the_tokenizer_gives_the_whole_text() -> None:
    from tokenizers import Tokenizer

    messages = [Message(role="system", content="Be brief. "), user("the quick  brown\n\nfox, <b>12</b> [x]")]
    for name in ("CHATML", "LLAMA", "MISTRAL"):
        template = TEMPLATES[name]
        ids = template.start(messages, ()).tolist()
        codec = template.codec
        assert isinstance(codec, HfTokenizer)
        whole = Tokenizer.from_str(codec.to_json())
        assert ids == whole.encode(codec.decode(ids), add_special_tokens=False).ids, name


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.needs("transformers")
def test_a_prompt_is_what_transformers_makes_of_it(name: str) -> None:
    import transformers
    from tokenizers import Tokenizer

    template = TEMPLATES[name]
    codec = template.codec
    assert isinstance(codec, HfTokenizer)
    special = {"bos_token": "<s>", "eos_token": "</s>"} if name == "MISTRAL" else styles.VARIABLES
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(codec.to_json()), **special
    )
    theirs.chat_template = getattr(styles, name).replace("strftime_now('%d %b %Y')", "'05 Mar 2026'")
    messages = [
        Message(role="system", content="  You look things up. "),
        user("Where is  the <b>fox</b>?\n\n [12]"),
    ]
    function = {"name": "look", "description": "Looks.", "parameters": LOOK.parameters}
    for tools in ([], [{"type": "function", "function": function}]):
        given = theirs.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            tools=tools or None,
            add_generation_prompt=True,
            return_dict=True,
        )
        assert template.start(messages, [LOOK] if tools else ()).tolist() == given["input_ids"]


TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, byte_level().size + 5), max_size=8),
        st.booleans(),
        st.lists(PIECES, min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def said_by(template: ChatTemplate, ids: list[int], closed: bool) -> list[int]:
    """`ids` as a turn: no stop token before its end."""
    kept = [id for id in ids if id not in template.stop]
    return [*kept, template.stop[0]] if closed else kept


@pytest.mark.parametrize("name", ["CHATML", "HERMES", "LLAMA"])
@settings(max_examples=40, deadline=None)
@given(turns=TURNS, content=PIECES)
def test_a_row_that_goes_on_is_never_touched(
    name: str, turns: list[tuple[list[int], bool, list[str]]], content: str
) -> None:
    """Whichever way tokens are made, what was given and what was said stays, id by id; and where the
    conversation rendered whole goes on, it gives what appending gives."""
    template = TEMPLATES[name]
    appending, whole = template.conversation(), Rerendering(template)
    row = appending.start([user(content)], [LOOK]).tolist()
    assert whole.start([user(content)], [LOOK]).tolist() == row
    forked = False
    for ids, closed, contents in turns:
        said = said_by(template, ids, closed)
        given, other = (each.observe(said, contents, closed=closed) for each in (appending, whole))
        assert not given.fork
        assert given.injected == (0 if closed else 1)
        forked = forked or other.fork
        if not forked:
            assert other.tokens.tolist() == given.tokens.tolist()
            assert other.injected == given.injected
    if name != "LLAMA":  # which trims what the assistant said
        assert not forked


def test_a_forgetful_template_forks_the_row() -> None:
    template = TEMPLATES["FORGETFUL"].changed(rewrites=True)
    codec, talk = template.codec, template.conversation()
    talk.start([user("Where?")], ())
    thought = codec.encode_marked("<think>\nHm.\n</think>\n\nLet me look.<|im_end|>")
    given = talk.observe(thought, ["Nothing."], closed=True)
    assert given.fork and given.injected == 0
    text = codec.decode(given.tokens.tolist())
    assert text == (
        "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\nLet me look.<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nNothing.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    plain = talk.observe(codec.encode_marked("Again.<|im_end|>"), ["Here."], closed=True)
    assert not plain.fork, "nothing was thought, so nothing is dropped and the new row goes on"
    assert codec.decode(plain.tokens.tolist()).startswith("\n<|im_start|>user\n<tool_response>\nHere.")


def test_what_the_policy_only_spells_is_no_mark_to_the_template() -> None:
    template = TEMPLATES["FORGETFUL"].changed(rewrites=True)
    codec, talk = template.codec, template.conversation()
    talk.start([user("Where?")], ())
    said = [*codec.encode("<think>Hm.</think>Let me look."), template.stop[0]]
    assert not talk.observe(said, ["Nothing."], closed=True).fork


def test_a_template_that_wants_structure_is_given_it() -> None:
    template = chat(styles.STRICT)
    assert template.habit.structured
    told = template.codec.decode(template.observation(["One.", "Two."], closed=True).tolist())
    assert told == "[TOOL_RESULTS]One.[/TOOL_RESULTS][TOOL_RESULTS]Two.[/TOOL_RESULTS]"
    with pytest.raises(ConfigError, match="rewrites history and wants calls as structure"):
        template.changed(rewrites=True)


def test_a_template_without_tools_tells_results_as_a_user() -> None:
    source = styles.CHATML.replace(
        "{{- '<|im_start|>' + message.role",
        "{% if message.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
        "{{- '<|im_start|>' + message.role",
    )
    template = chat(source)
    told = template.codec.decode(template.observation(["One."], closed=True).tolist())
    assert told == "\n<|im_start|>user\nOne.<|im_end|>\n<|im_start|>assistant\n"


def test_the_stop_token_is_what_the_template_writes_and_others_by_name() -> None:
    template = chat(styles.CHATML, stop=("<|endoftext|>",))
    codec = template.codec
    assert template.stop == tuple(codec.controls[name] for name in ("<|im_end|>", "<|endoftext|>"))
    assert template.text([*codec.encode("a"), template.stop[1]]) == "a"
    assert template.text([]) == ""
    assert template.changed(rewrites=True).stop == template.stop
    with pytest.raises(ConfigError, match="<nothing>"):
        chat(styles.CHATML, stop=("<nothing>",))


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ("{% if %}", ConfigError, "not Jinja"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            ConfigError,
            "no control token",
        ),
        ("{{ raise_exception('never') }}", TemplateRefusal, "never"),
        ("{{ messages.append(1) }}", TemplateRefusal, "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", TemplateRefusal, "SecurityError|unsafe"),
        ("{% set x = cycler.__init__.__globals__ %}{{ x.os }}", TemplateRefusal, "unsafe|SecurityError"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
            "<|{{ m.content }}|>{% endif %}{% endfor %}",
            ConfigError,
            "could complete the control token <|",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}u{% elif messages | length < 3 %}"
            "{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            ConfigError,
            "no second turn",
        ),
    ],
)
def test_a_template_that_cannot_serve_is_refused(source: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        chat(source)


def test_the_helpers_of_hugging_face_are_there() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"
        "{% else %}{{ m | tojson(ensure_ascii=True) }}{% endif %}{% endfor %}{{ strftime_now('%Y-%m-%d') }}"
    )
    template = chat(source)
    prompt = template.codec.decode(template.start([user("é<|im_end|>")], ()).tolist())
    assert prompt == '{"role": "user", "content": "\\u00e9<|im_end|>"}2026-03-05'
