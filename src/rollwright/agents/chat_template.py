"""The chat template of a Hugging Face model as our `Template`.

Role: conversations of policies that come from a checkpoint. Neighbours: `chat_jinja` renders, `content`
keeps content apart, the codec (`model.hf_tokenizer`) encodes; `probe` decides whether history is kept;
`episode` asks for the conversation. Invariants: sampled ids are never encoded again in the row that they
were sampled in; a control id comes from template text or from the policy, never from content.

Only text between turns is encoded, as a piece of its own: what the template adds from the end of the
assistant's turn to where it speaks again. The token that ends the turn is found by looking what the template
writes there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rollwright.agents.base import Codec, Continuation, Conversation
from rollwright.agents.chat_jinja import JinjaChat, TemplateRefusal
from rollwright.agents.content import STAND_IN, Breaker, barrier_for, enclosed, escaped, strings
from rollwright.agents.conversation import Appending, injected
from rollwright.errors import ConfigError
from rollwright.types import Ints, Message, ToolSpec

HERMES = ("<tool_call>", "</tool_call>")
"""How Hermes and Qwen mark a call."""

ANCHOR = "Qanchor7Z"
"""Stands for what an assistant or a tool says while a template is looked at."""


class ChatCodec(Codec, Protocol):
    """A codec whose control tokens template text may name."""

    @property
    def controls(self) -> Mapping[str, int]:
        """Control tokens by name."""

    def encode_marked(self, text: str, *, barrier: str = "", begins: bool = False) -> list[int]:
        """Ids of template text; `barrier` breaks names and is left out."""


@dataclass(frozen=True)
class Said:
    """One message of the history; an assistant's has the ids it was sampled as."""

    role: str
    content: str = ""
    ids: tuple[int, ...] | None = None
    calls: int = 0
    """Calls to give as structure, while a template is looked at that asks for it."""


@dataclass(frozen=True)
class Rendered:
    """What a template wrote, content broken by `barrier`."""

    text: str
    barrier: str

    @property
    def alike(self) -> str:
        """The text with its barrier replaced by one that all share; as long as `text`."""
        return self.text.replace(self.barrier, STAND_IN)

    def rest(self, start: int) -> Rendered:
        """What stands from character `start` on."""
        return Rendered(self.text[start:], self.barrier)


@dataclass(frozen=True)
class Habit:
    """How a template takes observations."""

    role: str
    structured: bool
    """It wants the assistant's calls as structure before it takes a tool's message."""


class ChatTemplate:
    """A chat template over the tokenizer it was written for.

    Args:
        codec: the model's tokenizer.
        source: the template's Jinja text (`chat_template.jinja`).
        now: the date it may stamp; the same for the whole run, so that no prompt changes at midnight.
        variables: what it may name: `bos_token`, `eos_token`, `enable_thinking`, ….
        stop: names of further control tokens that end a turn.
        marks: what opens and closes a call.
        rewrites: `probe` found that it rewrites history: conversations are rendered whole each turn, and
            fork the row where they changed.

    Raises:
        ConfigError: not Jinja, or no control token ends an assistant's turn.
    """

    def __init__(
        self,
        codec: ChatCodec,
        source: str,
        now: datetime,
        *,
        variables: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        marks: tuple[str, str] = HERMES,
        rewrites: bool = False,
    ) -> None:
        self.codec, self.rewrites = codec, rewrites
        self._source, self.now, self._variables = source, now, dict(variables or {})
        self._chat = JinjaChat(source, self._variables, now)
        self._breaker, self._marks = Breaker(codec.controls), marks
        self._names = {id: name for name, id in codec.controls.items()}
        self.end = self._found_end()
        named = [codec.controls[name] for name in stop if name in codec.controls]
        if missing := [name for name in stop if name not in codec.controls]:
            raise ConfigError(f"stop names {', '.join(missing)}, which the tokenizer has no token for")
        self._stop = tuple(dict.fromkeys([codec.controls[self.end], *named]))
        self.habit = self._found_habit()
        if rewrites and self.habit.structured:
            raise ConfigError(
                "this chat template rewrites history and wants calls as structure, which what a policy said "
                "cannot be turned back into without loss: it is not supported. Use a template that takes "
                "the assistant's text as it is"
            )

    def changed(self, *, rewrites: bool | None = None, now: datetime | None = None) -> ChatTemplate:
        """The same template, told otherwise."""
        extra = [self._names[id] for id in self._stop[1:]]
        return ChatTemplate(
            self.codec,
            self._source,
            self.now if now is None else now,
            variables=self._variables,
            stop=extra,
            marks=self._marks,
            rewrites=self.rewrites if rewrites is None else rewrites,
        )

    @property
    def stop(self) -> tuple[int, ...]:
        """Ids that end an assistant turn; the first is the one that the template writes."""
        return self._stop

    @property
    def marks(self) -> tuple[str, str]:
        """What opens and closes a call."""
        return self._marks

    def conversation(self) -> Conversation:
        """Append-only, or rendered whole each turn where the template rewrites history."""
        return Rerendering(self) if self.rewrites else Appending(self)

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ints:
        """int32[P]: the first prompt, ending where the assistant speaks."""
        said = [Said(message.role, message.content) for message in messages]
        return self.ids(self.render(said, tools, prompt=True), begins=True)

    def observation(self, contents: Sequence[str], *, closed: bool) -> Ints:
        """int32[N]: tool results, then the assistant's opening; first what ends the turn where it was not
        `closed`."""
        calls = len(contents) if self.habit.structured else 0
        assistant = Said("assistant", ANCHOR, calls=calls)
        told = [Said(self.habit.role, content) for content in contents]
        asked = Said("user", "Hi.")
        full = self.render([asked, assistant, *told], (), prompt=True)
        if ANCHOR in full.text:
            behind = full.text.find(ANCHOR) + len(ANCHOR)
        else:  # the structure of calls takes the place of what was said
            before = self.render([asked], (), prompt=True)
            if not full.alike.startswith(before.alike):
                raise TemplateRefusal("the chat template does not show what the assistant said")
            behind = len(before.text)
        return self.after(full.rest(behind), closed=closed)

    def after(self, rest: Rendered, *, closed: bool) -> Ints:
        """int32[N]: `rest`, which begins behind what the assistant said; without the end of its turn where
        that was sampled."""
        at = rest.text.find(self.end)
        if at < 0:
            raise TemplateRefusal(f"the chat template did not end the assistant's turn with {self.end}")
        return self.ids(rest.rest(at + len(self.end)) if closed else rest, begins=False)

    def text(self, ids: Sequence[int]) -> str:
        """What an assistant turn says, its control tokens as text, the stop token left out."""
        return self.codec.decode(self._open(ids))

    def ids(self, rendered: Rendered, *, begins: bool) -> Ints:
        """int32[N] of what a template wrote."""
        made = self.codec.encode_marked(rendered.text, barrier=rendered.barrier, begins=begins)
        return np.array(made, dtype=np.int32)

    def render(self, history: Sequence[Said], tools: Sequence[ToolSpec], *, prompt: bool) -> Rendered:
        """A conversation as text.

        Raises:
            TemplateRefusal: the template will not have it.
        """
        given = [_tool(spec) for spec in tools]
        barrier = barrier_for([*(self._spelled(each) for each in history), *strings(given)])
        messages = [self._message(each, number, barrier) for number, each in enumerate(history)]
        text = self._chat.render(messages, self._breaker.nested(given, barrier), prompt=prompt)
        return Rendered(text.replace(escaped(barrier), barrier), barrier)

    def own(self, ids: Sequence[int], barrier: str) -> str:
        """What the policy said: control tokens by name, text that only spells one broken."""
        parts: list[str] = []
        run: list[int] = []
        for id in [*self._open(ids), None]:
            if id is not None and id not in self._names:
                run.append(id)
                continue
            parts.append(self._breaker.own(self.codec.decode(run), barrier))
            parts.append("" if id is None else self._names[id])
            run = []
        return "".join(parts)

    def _open(self, ids: Sequence[int]) -> list[int]:
        said = [int(id) for id in ids]
        return said[:-1] if said and said[-1] in self._stop else said

    def _spelled(self, said: Said) -> str:
        return said.content if said.ids is None else self.codec.decode(said.ids)

    def _message(self, said: Said, number: int, barrier: str) -> dict[str, Any]:
        if said.ids is not None:
            content = self.own(said.ids, barrier)
        else:
            content = self._breaker.foreign(said.content, barrier)
        made: dict[str, Any] = {"role": said.role, "content": content}
        if said.role == "tool":
            made |= {"name": "tool", "tool_call_id": f"call{number:05}"}
        if said.calls:
            calls = [
                {"id": f"call{number + 1 + i:05}", "type": "function", "function": dict(_CALL)}
                for i in range(said.calls)
            ]
            made["tool_calls"] = calls
        return made

    def _found_end(self) -> str:
        """The control token that the template writes behind what an assistant said."""
        history = [Said("user", "Hi."), Said("assistant", ANCHOR)]
        text = self._chat.render([self._message(each, 0, "") for each in history], (), prompt=False)
        behind = text[text.rfind(ANCHOR) + len(ANCHOR) :].lstrip() if ANCHOR in text else ""
        ordered = sorted(self.codec.controls, key=len, reverse=True)
        found = next((name for name in ordered if behind.startswith(name)), None)
        if found is None:
            raise ConfigError(
                f"no control token ends an assistant's turn in this chat template (it writes {behind[:40]!r} "
                "there), so it cannot be known when the policy has finished: use the template and the "
                "tokenizer of an instruction-tuned model"
            )
        return found

    def _found_habit(self) -> Habit:
        """The first way to tell what a tool said that the template takes and shows."""
        for habit in (Habit("tool", False), Habit("tool", True), Habit("user", False)):
            calls = 2 if habit.structured else 0
            told = [Said(habit.role, ANCHOR + ANCHOR * i) for i in range(2)]
            assistant = Said("assistant", "Hm.", calls=calls)
            if habit.role == "user":
                told = told[:1]
            try:
                text = self.render([Said("user", ANCHOR), assistant, *told], (), prompt=True).text
            except TemplateRefusal:
                continue
            if all(each.content in text for each in told):
                self._check_enclosed(text)
                return habit
        raise ConfigError("this chat template takes no message after the assistant's first: no second turn")

    def _check_enclosed(self, text: str) -> None:
        """Refuse a template that writes the beginning of a control name before a content and its end behind
        it: content could complete the name."""
        parts = re.split(f"(?:{ANCHOR})+", text)
        for before, after in pairwise(parts):
            if name := enclosed(self.codec.controls, before, after):
                raise ConfigError(
                    f"this chat template writes content between {before[-8:]!r} and {after[:8]!r}, where it "
                    f"could complete the control token {name}: it is not supported"
                )


_CALL: Mapping[str, Any] = {"name": "tool", "arguments": {}}


def _tool(spec: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates expect it (the JSON schema of a function)."""
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {"type": "function", "function": function}


@dataclass
class Rerendering:
    """A conversation that is rendered whole each turn: appended to where the text goes on, forked where the
    template changed what was there.

    Invariant: `seen` is the text of the row as it stands, the sampled part of it decoded.
    """

    template: ChatTemplate
    role: str = ""
    """Who tells what came back; "" is as the template wants it."""
    history: list[Said] = field(default_factory=list)
    tools: tuple[ToolSpec, ...] = ()
    seen: str = ""
    expected: str = ""
    """The text that the last rendering had to begin with."""

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Ints:
        """See `Conversation.start`."""
        self.tools = tuple(tools)
        self.history = [Said(message.role, message.content) for message in messages]
        rendered = self.template.render(self.history, self.tools, prompt=True)
        self.seen = rendered.alike
        return self.template.ids(rendered, begins=True)

    def observe(self, said: Sequence[int], contents: Sequence[str], *, closed: bool) -> Continuation:
        """See `Conversation.observe`."""
        template = self.template
        role = self.role or template.habit.role
        calls = len(contents) if template.habit.structured and role == "tool" else 0
        self.history.append(Said("assistant", ids=tuple(int(id) for id in said), calls=calls))
        self.history += [Said(role, content) for content in contents]
        full = template.render(self.history, self.tools, prompt=True)
        # where calls are given as structure, the template writes them, so that only the end can be looked at
        self.expected = self.seen + ("" if calls else template.own(said, STAND_IN))
        self.seen = full.alike
        behind = full.rest(len(self.expected))
        goes_on = bool(calls) or behind.text.lstrip().startswith(template.end)
        if not self.seen.startswith(self.expected) or not goes_on:
            return Continuation(template.ids(full, begins=True), fork=True)
        tokens = template.after(behind, closed=closed)
        return Continuation(tokens, 0 if closed else injected(tokens, template.stop))
