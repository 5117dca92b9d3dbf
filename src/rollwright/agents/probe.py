"""Does a chat template keep history, or rewrite it?

Role: decides at the start of a run how conversations become tokens. Neighbours: `chat_template` is asked;
the rollout side of a run tells `verdict`, whoever makes a chat template takes `probed`. Invariant: what is
compared is what a rollout would be given, token by token, with what the template writes of the whole
conversation.

Conversations of growing length are rendered: with and without a system message and tools, with thinking,
several results in a turn, empty contents, a turn that was cut off. A conversation in which a person speaks
again is looked at apart: our agents do not have one, and some templates keep the thinking of a turn while
tools are used and drop it there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from rollwright.agents.base import Codec, Template
from rollwright.agents.chat_jinja import TemplateRefusal
from rollwright.agents.chat_template import ChatTemplate, Rerendering, Said
from rollwright.types import Message, ToolSpec

THINK = ("<think>", "</think>")
CONTEXT = 24
"""Characters shown of each side of a change."""
SHOWN = 3
"""Findings that are told; the others are counted."""


class Mode(enum.Enum):
    """What a template does to history."""

    APPEND_ONLY = "append-only"
    REWRITES = "rewrites history"


@dataclass(frozen=True)
class Finding:
    """A place where the text of turn N+1 does not go on from turn N."""

    case: str
    turn: int
    """Turns that had been said."""
    token: int
    """Where in the row: tokens before it are the same."""
    was: str
    now: str

    def line(self) -> str:
        """In words."""
        return f"{self.case}, after turn {self.turn}, token {self.token}: {self.was!r} became {self.now!r}"


@dataclass(frozen=True)
class Verdict:
    """What the probe found."""

    mode: Mode
    """Of conversations as agents have them: a task, then turns and tool results."""
    dialogue: Mode
    """Of conversations in which a person speaks again."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """For a person: the verdict, then where and what."""
        if self.mode is Mode.APPEND_ONLY:
            head = "chat template: append-only, each turn's prompt goes on from the one before"
        else:
            head = "chat template: rewrites history, so that rollouts are kept in several rows"
        if self.dialogue is not self.mode:
            head += f" ({self.dialogue.value} where a person speaks again)"
        told = [finding.line() for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            told.append(f"and in {len(self.findings) - SHOWN} more of {len(CASES)} conversations")
        return (head, *(f"  {line}" for line in (*told, *self.notes)))


@dataclass(frozen=True)
class Case:
    """A conversation: the task, then what the assistant says and what comes back, turn by turn."""

    name: str
    task: tuple[Message, ...]
    turns: tuple[tuple[str, tuple[str, ...]], ...]
    tools: bool = True
    person: bool = False
    """What comes back is a person's message."""
    cut: int = -1
    """The turn that ends without a stop token."""


_SYSTEM = Message(role="system", content="You look things up.")
_ASK = Message(role="user", content="Where is it?")
_THOUGHT = f"{THINK[0]}\nIt may be in the hall.\n{THINK[1]}\n\nLet me look."

CASES = (
    Case("plain", (_SYSTEM, _ASK), (("Let me look.", ("Nothing.",)), ("Again.", ("Here.",))), tools=False),
    Case(
        "tools", (_SYSTEM, _ASK), (("Let me look.", ("Nothing.",)), ("Again.", ("Here.",)), ("So.", ("b",)))
    ),
    Case("no system message", (_ASK,), (("Let me look.", ("Nothing.",)), ("Again.", ("Here.",)))),
    Case("two results in a turn", (_SYSTEM, _ASK), (("Both.", ("One.", "Two.")), ("Again.", ("Three.",)))),
    Case("empty contents", (_SYSTEM, _ASK), (("", ("",)), ("Again.", ("Here.",)))),
    Case("thinking", (_SYSTEM, _ASK), ((_THOUGHT, ("Nothing.",)), (_THOUGHT, ("Here.",)))),
    Case("a turn cut off", (_SYSTEM, _ASK), (("Let me", ("error: cut",)), ("Again.", ("Here.",))), cut=0),
    Case("a person speaks again", (_SYSTEM, _ASK), (("It.", ("And?",)), ("So.", ("b",))), person=True),
    Case("thinking, a person speaks again", (_ASK,), ((_THOUGHT, ("And?",)), ("So.", ("b",))), person=True),
)

_TOOLS = (
    ToolSpec(
        name="look",
        description="Looks.",
        parameters={"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]},
    ),
)


def probe(template: ChatTemplate, cases: Sequence[Case] = CASES) -> Verdict:
    """Look at `template` with `cases`. What it refuses becomes a note."""
    findings: list[Finding] = []
    modes = {False: Mode.APPEND_ONLY, True: Mode.APPEND_ONLY}
    notes: list[str] = []
    for case in cases:
        try:
            found, remark = _look(template, case)
        except TemplateRefusal as refusal:
            notes.append(f"{case.name}: {refusal}")
            continue
        if found is not None:
            findings.append(found)
            modes[case.person] = Mode.REWRITES
        if remark and remark not in notes:
            notes.append(remark)
    notes += _notes(template)
    return Verdict(modes[False], modes[True], tuple(findings), tuple(notes))


def verdict(template: Template, codec: Codec) -> Verdict:
    """What any template does to history. One that is no chat template is asked for the whole conversation as
    messages, which must give the row that grew turn by turn."""
    if isinstance(template, ChatTemplate):
        return probe(template)
    found = [_grown(case, template, codec) for case in CASES if not case.person]
    findings = tuple(each for each in found if each is not None)
    mode = Mode.REWRITES if findings else Mode.APPEND_ONLY
    return Verdict(mode, mode, findings, ())


def probed(template: ChatTemplate) -> tuple[ChatTemplate, Verdict]:
    """`template` in the mode that suits it, and why.

    Raises:
        ConfigError: it rewrites history in a way that no fork can follow.
    """
    verdict = probe(template)
    return template.changed(rewrites=verdict.mode is Mode.REWRITES), verdict


def _grown(case: Case, template: Template, codec: Codec) -> Finding | None:
    """The first turn of `case` after which the row is not what the whole conversation gives."""
    tools, talk, history = _TOOLS if case.tools else (), template.conversation(), list(case.task)
    row = talk.start(case.task, tools).tolist()
    for number, (text, contents) in enumerate(case.turns):
        closed = number != case.cut
        said = [*codec.encode(text), *(template.stop[:1] if closed else ())]
        given = talk.observe(said, contents, closed=closed)
        row = [] if given.fork else row + said
        row += given.tokens.tolist()
        history.append(Message(role="assistant", content=text))
        history += (Message(role="tool", content=content) for content in contents)
        whole = template.start(history, tools).tolist()
        if given.fork or whole != row:
            at = _same(row, whole)
            was, now = (codec.decode(ids[at : at + 8]) for ids in (row, whole))
            return Finding(case.name, number + 1, at, was, now)
    return None


def _look(template: ChatTemplate, case: Case) -> tuple[Finding | None, str]:
    """The first place where `case` is rewritten, and a remark on tokens."""
    whole = Rerendering(template, role="user" if case.person else "")
    row = whole.start(case.task, _TOOLS if case.tools else ()).tolist()
    remark = ""
    for number, (text, contents) in enumerate(case.turns):
        closed = number != case.cut
        said = [*template.codec.encode_marked(text), *(template.stop[:1] if closed else ())]
        given = whole.observe(said, contents, closed=closed)
        if given.fork:
            return _difference(case, number + 1, row, whole), remark
        row += said
        if not case.person:
            mine = template.observation(contents, closed=closed).tolist()
            theirs = given.tokens.tolist()
            if mine != theirs:
                at = _same(mine, theirs)
                was, now = (template.codec.decode(ids[at : at + 8]) for ids in (mine, theirs))
                return Finding(case.name, number + 1, len(row) + at, was, now), remark
        row += given.tokens.tolist()
        if not template.habit.structured:
            remark = remark or _border(template, row, whole, case)
    return None, remark


def _difference(case: Case, turn: int, row: Sequence[int], whole: Rerendering) -> Finding:
    """Where the text stops being what it was."""
    was, now, codec = whole.expected, whole.seen, whole.template.codec
    at = _same(was, now)
    start, number = 0, 0
    for id in row:
        size = len(codec.decode([id]))
        if start + size > at:
            break
        start, number = start + size, number + 1
    return Finding(case.name, turn, number, was[start : start + CONTEXT], now[start : start + CONTEXT])


def _border(template: ChatTemplate, row: Sequence[int], whole: Rerendering, case: Case) -> str:
    """Whether encoding the whole text anew would give other tokens than the row has."""
    rendered = template.render(whole.history, whole.tools, prompt=True)
    anew = template.ids(rendered, begins=True).tolist()
    if anew == list(row):
        return ""
    at = _same(anew, row)
    return (
        f"{case.name}: encoded as one text it would have other tokens from token {at} on "
        f"({template.codec.decode(anew[at : at + 4])!r}); the row keeps those that were sampled"
    )


def _notes(template: ChatTemplate) -> list[str]:
    """What else a person should know."""
    notes = []
    if template.habit.role == "user":
        notes.append("it takes no tool messages: results are given as a user's")
    if template.habit.structured:
        notes.append("it takes tool messages only behind calls given as structure")
    try:
        plain = template.render([Said("user", "Where is it?")], (), prompt=True).text
        later = template.changed(now=template.now + timedelta(days=400))
        if later.render([Said("user", "Where is it?")], (), prompt=True).text != plain:
            notes.append(f"it stamps the date: all of the run is given {template.now:%Y-%m-%d}")
        if plain.partition("Where is it?")[0].count(template.end):
            notes.append("it adds a system message of its own where a task has none")
    except TemplateRefusal as refusal:
        notes.append(f"without a system message: {refusal}")
    return notes


def _same(one: Sequence[object], other: Sequence[object]) -> int:
    """How far two sequences agree from their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
