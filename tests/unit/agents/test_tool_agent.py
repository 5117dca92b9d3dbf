"""The agent: what is in the row is what the engine sampled, and every way to end is told apart."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.agents.base import Continuation, Draft, Session
from rollwright.agents.config import AgentConfig
from rollwright.agents.conversation import Appending
from rollwright.agents.template import CONTROL, PieceTemplate
from rollwright.agents.tool_agent import ToolAgent
from rollwright.errors import ContextOverflow, EngineError, SandboxLost
from rollwright.events import ListSink, SpanEnded, TraceContext
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.testing.clock import FakeClock
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.tools.base import Action
from rollwright.types import (
    CallStatus,
    Completion,
    Finish,
    Identity,
    Message,
    Outcome,
    PolicyVersion,
    Provenance,
    Rollout,
    Sampling,
    Task,
    TaskLimits,
    ToolResult,
    ToolSpec,
    VersionSpan,
)

CODEC = PieceTokenizer(["sql ", "bada", "none"], CONTROL)
TEMPLATE = PieceTemplate(CODEC)
END, OPEN, CLOSE = (CODEC.control(name) for name in ("<|end|>", "<call>", "</call>"))
SQL = ToolSpec(
    name="sql",
    description="",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)
VERSIONS = tuple(PolicyVersion(run="run", step=step) for step in range(3))

Reply = Callable[[], Awaitable[Completion]] | Completion
Answer = Callable[[Action], Awaitable[ToolResult]]


def completion(ids: Sequence[int], finish: Finish | None = None, *, seed: int = 0) -> Completion:
    """A completion of these ids by two versions, with logprobs nobody could guess."""
    rng = np.random.default_rng([seed, len(ids)])
    tokens, middle = np.array(ids, dtype=np.int32), len(ids) // 2
    stopped = Finish.STOP if len(ids) and ids[-1] == END else Finish.LENGTH
    spans = (
        VersionSpan(version=VERSIONS[seed % 2], start=0, end=middle),
        VersionSpan(version=VERSIONS[seed % 2 + 1], start=middle, end=len(ids)),
    )
    return Completion(
        request="",
        tokens=tokens,
        logprobs=rng.uniform(-5, 0, len(ids)).astype(np.float32),
        spans=spans,
        finish=finish or stopped,
        cached=3,
        prompt_tokens=9,
    )


def say(text: str, seed: int = 0) -> Completion:
    """A turn that says `text`, its control pieces as such, and stops."""
    ids: list[int] = []
    for i, part in enumerate(
        text.replace("</call>", "\0</call>\0").replace("<call>", "\0<call>\0").split("\0")
    ):
        ids += [CODEC.control(part)] if i % 2 else CODEC.encode(part)
    return completion([*ids, END], seed=seed)


class Engine:
    """Gives the replies in order; keeps what it was asked and what it gave."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies = list(replies)
        self.prompts: list[np.ndarray] = []
        self.samplings: list[Sampling] = []
        self.requests: list[str] = []
        self.given: list[Completion] = []

    async def generate(self, prompt, sampling: Sampling, *, request: str, session: str = "") -> Completion:  # type: ignore[no-untyped-def]
        self.prompts.append(prompt.copy())
        self.samplings.append(sampling)
        self.requests.append(request)
        reply = self.replies.pop(0)
        given = reply if isinstance(reply, Completion) else await reply()
        self.given.append(given)
        return given


class Door:
    """One tool, answered by a function."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.actions: list[Action] = []

    def specs(self, names: tuple[str, ...]) -> tuple[ToolSpec, ...]:
        return (SQL,)

    async def invoke(self, action: Action) -> ToolResult:
        self.actions.append(action)
        if self.answer is not None:
            return await self.answer(action)
        return ToolResult(call=action.call.id, status=CallStatus.OK, content="bada")


async def run(
    replies: Sequence[Reply] | Engine,
    door: Door | None = None,
    *,
    limits: TaskLimits | None = None,
    seconds: float = 1000.0,
    events: ListSink | None = None,
    template: PieceTemplate = TEMPLATE,
    draft: Draft | None = None,
) -> tuple[Rollout, Engine]:
    clock, engine = FakeClock(), replies if isinstance(replies, Engine) else Engine(replies)
    limits = limits or TaskLimits(max_turns=6, max_tokens=400, turn_tokens=64)
    task = Task(
        id="t",
        set="s",
        messages=(Message(role="user", content="bada"),),
        tools=("sql",),
        checks=(),
        limits=limits,
    )
    sandbox = await MemorySandboxes().create(owner="s")
    session = Session(
        identity=Identity(run="run", rollout="g0/0.0"),
        engine=engine,  # type: ignore[arg-type]
        door=door or Door(),
        codec=CODEC,
        template=template,
        sandbox=sandbox,
        sampling=Sampling(temperature=0.7, seed=5),
        clock=clock,
        trace=TraceContext.new(),
        events=events or ListSink(),
        deadline=clock.now() + seconds,
        draft=draft or Draft(),
    )
    agent = ToolAgent(AgentConfig(calls_per_turn=2, observation_characters=80))
    try:
        return await agent.run(task, session), engine
    finally:
        await sandbox.kill()


TURNS = st.lists(
    st.one_of(
        st.lists(st.integers(0, CODEC.size - 1), min_size=1, max_size=12),
        st.sampled_from([[END], [OPEN, END], [OPEN, 65, CLOSE], [OPEN, CLOSE, END], CODEC.encode("<call>x")]),
        st.text(max_size=5).map(lambda text: [OPEN, *CODEC.encode(f"sql {text}"), CLOSE, END]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_the_row_is_exactly_what_the_engine_gave(turns: list[list[int]]) -> None:
    replies = [completion(ids, seed=i) for i, ids in enumerate([*turns, *[[65, END]] * 6])]
    rollout, engine = asyncio.run(run(replies))
    (row,) = rollout.rows
    assert np.array_equal(row.tokens[row.sampled], np.concatenate([c.tokens for c in engine.given]))
    assert np.array_equal(row.logprobs[row.sampled], np.concatenate([c.logprobs for c in engine.given]))
    assert not row.logprobs[~row.sampled].any()
    by_token = {i: span.version for span in row.spans for i in range(span.start, span.end)}
    made_by = [span.version for c in engine.given for span in c.spans for _ in range(span.start, span.end)]
    assert list(by_token) == np.flatnonzero(row.sampled).tolist()
    assert list(by_token.values()) == made_by
    for prompt, turn in zip(engine.prompts, rollout.turns, strict=True):  # append-only
        assert np.array_equal(row.tokens[: len(prompt)], prompt)
        assert len(prompt) == turn.start
    assert len(row.tokens) <= 400
    assert rollout.outcome.scorable
    for turn in rollout.turns:
        assert [call.id for call in turn.calls] == [result.call for result in turn.results]


async def test_a_whole_rollout() -> None:
    events = ListSink()
    door = Door()
    replies = [say("<call>sql SELECT 1</call>", 0), say("<call>sql SELECT 2</call>", 1), say(" bada ", 0)]
    rollout, engine = await run(replies, door, events=events)
    assert (rollout.outcome, rollout.answer) == (Outcome.ANSWERED, "bada")
    assert [action.call.arguments for action in door.actions] == [
        {"query": "SELECT 1"},
        {"query": "SELECT 2"},
    ]
    assert [action.call.id for action in door.actions] == ["g0/0.0/0/0", "g0/0.0/1/0"]
    assert [len(action.history) for action in door.actions] == [0, 1]
    assert engine.requests == ["g0/0.0/0", "g0/0.0/1", "g0/0.0/2"]
    assert engine.samplings[0] == Sampling(temperature=0.7, seed=5, max_tokens=64, stop=(END,))
    text = CODEC.decode(rollout.rows[0].tokens.tolist())
    assert text == (
        "<|user|>bada<|end|><|assistant|><call>sql SELECT 1</call><|end|><|tool|>bada<|end|><|assistant|>"
        "<call>sql SELECT 2</call><|end|><|tool|>bada<|end|><|assistant|> bada <|end|>"
    )
    assert [turn.cached for turn in rollout.turns] == [3, 3, 3]
    spans = [event for event in events.events if isinstance(event, SpanEnded)]
    assert [span.attributes["turn"] for span in spans] == [0, 1, 2]


async def test_a_turn_without_stop_gets_an_injected_one() -> None:
    rollout, engine = await run([completion([65] * 5), say("bada")])
    row = rollout.rows[0]
    at = engine.prompts[0].size + 5
    assert row.tokens[at] == END
    assert row.provenance[at] == Provenance.INJECTED
    assert row.provenance[at + 1] == Provenance.TOOL
    assert np.count_nonzero(row.provenance == Provenance.INJECTED) == 1
    assert "error: turn cut at 5 tokens" in CODEC.decode(row.tokens.tolist())
    assert (rollout.outcome, rollout.answer) == (Outcome.ANSWERED, "bada")


async def test_malformed_calls_become_short_observations_and_never_reach_the_door() -> None:
    door = Door()
    bad = ["<call></call>", "<call>sql [1]</call>", "<call>sql", "<call>sql <call>x</call></call>"]
    rollout, _ = await run([*[say(text) for text in bad], say("bada")], door)
    assert door.actions == []
    assert rollout.outcome is Outcome.ANSWERED
    results = [result for turn in rollout.turns for result in turn.results]
    assert [result.status for result in results] == [CallStatus.MALFORMED] * 4
    assert all(result.content.startswith("error: ") and len(result.content) <= 80 for result in results)


async def test_calls_beyond_the_limit_of_a_turn_are_refused() -> None:
    door = Door()
    rollout, _ = await run([say("<call>sql A</call><call>sql B</call><call>sql C</call>"), say("bada")], door)
    assert len(door.actions) == 2
    assert [r.status for r in rollout.turns[0].results] == [
        CallStatus.OK,
        CallStatus.OK,
        CallStatus.MALFORMED,
    ]


async def test_a_long_observation_is_cut() -> None:
    async def answer(action: Action) -> ToolResult:
        return ToolResult(call=action.call.id, status=CallStatus.OK, content="x" * 1000)

    rollout, _ = await run([say("<call>sql A</call>"), say("bada")], Door(answer))
    assert rollout.turns[0].results[0].content == "x" * 80 + "… (920 more characters)"
    assert rollout.outcome is Outcome.ANSWERED


async def test_too_many_turns() -> None:
    limits = TaskLimits(max_turns=2, max_tokens=400, turn_tokens=64)
    rollout, _ = await run([say("<call>sql A</call>")] * 2, limits=limits)
    assert (rollout.outcome, rollout.answer, len(rollout.turns)) == (Outcome.MAX_TURNS, None, 2)


@pytest.mark.parametrize("room", range(5, 40))
async def test_a_full_context_is_kept_and_never_exceeded(room: int) -> None:
    class Rambling(Engine):
        async def generate(
            self, prompt, sampling: Sampling, *, request: str, session: str = ""
        ) -> Completion:  # type: ignore[no-untyped-def]
            self.replies = [completion([65] * sampling.max_tokens)]
            return await super().generate(prompt, sampling, request=request)

    limits = TaskLimits(max_turns=9, max_tokens=room, turn_tokens=6)
    rollout, engine = await run(Rambling([]), limits=limits)
    assert rollout.outcome is Outcome.CONTEXT_FULL
    assert rollout.error is None
    assert len(rollout.rows[0].tokens) <= room
    assert rollout.rows[0].sampled.sum() == sum(len(c.tokens) for c in engine.given)


async def test_an_engine_whose_context_is_smaller_ends_the_same_way() -> None:
    async def overflow() -> Completion:
        raise ContextOverflow("no room")

    rollout, _ = await run([say("<call>sql A</call>"), overflow])
    assert (rollout.outcome, len(rollout.turns)) == (Outcome.CONTEXT_FULL, 1)


async def test_the_guard_can_end_a_rollout() -> None:
    async def answer(action: Action) -> ToolResult:
        return ToolResult(
            call=action.call.id, status=CallStatus.DENIED, content="error: denied", terminated=True
        )

    rollout, _ = await run([say("<call>sql A</call><call>sql B</call>")], Door(answer))
    assert rollout.outcome is Outcome.TERMINATED
    assert len(rollout.turns[0].results) == 1


async def test_an_aborted_request_keeps_its_tokens_and_is_no_answer() -> None:
    rollout, _ = await run([completion([65, 66], Finish.ABORT)])
    assert (rollout.outcome, rollout.answer) == (Outcome.REVOKED, None)
    assert rollout.rows[0].sampled.sum() == 2


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("seconds", "outcome"), [(1000.0, Outcome.TURN_TIMEOUT), (7.0, Outcome.ROLLOUT_TIMEOUT)]
)
async def test_a_tool_that_hangs_past_the_doors_own_deadline(seconds: float, outcome: Outcome) -> None:
    limits = TaskLimits(turn_seconds=10.0, tool_seconds=1.0)
    door = Door(hang)  # type: ignore[arg-type]
    rollout, _ = await run([say("<call>sql A</call>")], door, limits=limits, seconds=seconds)
    assert rollout.outcome is outcome
    assert rollout.seconds == min(10.0, seconds)
    assert door.actions[0].timeout == 1.0
    assert rollout.rows[0].sampled.any()  # what was sampled is kept


async def test_an_engine_that_hangs() -> None:
    rollout, _ = await run([hang], limits=TaskLimits(turn_seconds=3.0))  # type: ignore[list-item]
    assert (rollout.outcome, rollout.turns) == (Outcome.TURN_TIMEOUT, ())


async def test_what_the_infrastructure_did_wrong_goes_to_the_caller() -> None:
    async def lose(action: Action) -> ToolResult:
        raise SandboxLost("gone")

    with pytest.raises(SandboxLost):
        await run([say("<call>sql A</call>")], Door(lose))


@pytest.mark.parametrize("fault", ["logprobs", "spans", "gap"])
async def test_a_completion_that_contradicts_itself_is_refused(fault: str) -> None:
    good = completion([65, 66, END])
    spans = {"spans": (), "gap": (VersionSpan(version=VERSIONS[0], start=1, end=3),)}.get(fault, good.spans)
    logprobs = good.logprobs[:2] if fault == "logprobs" else good.logprobs
    bad = Completion(request="r", tokens=good.tokens, logprobs=logprobs, spans=spans, finish=Finish.STOP)
    with pytest.raises(EngineError, match="expected all three to agree"):
        await run([bad])


class Rewriting(PieceTemplate):
    """Keeps of each earlier turn only that it was there."""

    def conversation(self) -> Appending:
        return Shortening(self)


class Shortening(Appending):
    """Every turn gives a new prompt, shorter than what was said."""

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray:
        self.first = super().start(messages, tools)
        self.turns = 0
        return self.first

    def observe(self, said: Sequence[int], contents: Sequence[str], *, closed: bool) -> Continuation:
        self.turns += 1
        told = super().observe(said, contents, closed=True).tokens
        middle = np.array([65, END] * self.turns, dtype=np.int32)
        return Continuation(np.concatenate([self.first, middle, told]), fork=True)


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_a_rewritten_history_begins_a_new_row(turns: list[list[int]]) -> None:
    """Each row holds exactly the turn that was sampled in it, and as sampled only there."""
    replies = [completion(ids, seed=i) for i, ids in enumerate([*turns, *[[65, END]] * 6])]
    rollout, engine = asyncio.run(run(replies, template=Rewriting(CODEC)))
    assert len(rollout.rows) - len(rollout.turns) in (0, 1)
    for number, (turn, prompt, said) in enumerate(
        zip(rollout.turns, engine.prompts, engine.given, strict=True)
    ):
        row = rollout.rows[number]
        assert (turn.row, turn.start, turn.end) == (number, len(prompt), len(row.tokens))
        assert np.array_equal(row.tokens, [*prompt, *said.tokens])
        assert np.array_equal(row.logprobs[row.sampled], said.logprobs)
        assert (row.provenance[: turn.start] == Provenance.PROMPT).all()
        at = [(each.version, each.start - turn.start, each.end - turn.start) for each in row.spans]
        assert at == [(each.version, each.start, each.end) for each in said.spans if each.end > each.start]


async def test_limits_count_the_row_that_grows() -> None:
    """Four turns that would not fit into one row fit where each begins a new one; a prompt too long for any
    row ends the rollout."""
    long = completion([65] * 40 + [OPEN, *CODEC.encode("sql A"), CLOSE, END])
    limits = TaskLimits(max_turns=4, max_tokens=75, turn_tokens=64)
    rollout, _ = await run([long] * 4, limits=limits, template=Rewriting(CODEC))
    assert (rollout.outcome, len(rollout.rows)) == (Outcome.MAX_TURNS, 4)
    assert sum(len(row.tokens) for row in rollout.rows) > 75
    limits = TaskLimits(max_turns=9, max_tokens=12, turn_tokens=64)
    rollout, engine = await run([say("<call>sql A</call>")] * 9, limits=limits, template=Rewriting(CODEC))
    assert rollout.outcome is Outcome.CONTEXT_FULL
    assert len(engine.prompts) > 1 and all(len(prompt) < 12 for prompt in engine.prompts)


async def test_a_rollout_that_breaks_off_keeps_its_rows() -> None:
    async def fail() -> Completion:
        raise EngineError("gone")

    draft = Draft()
    with pytest.raises(EngineError):
        await run([say("<call>sql A</call>"), fail], template=Rewriting(CODEC), draft=draft)
    assert [int(row.sampled.sum()) for row in draft.rows()] == [len(say("<call>sql A</call>").tokens), 0]
    assert [turn.row for turn in draft.turns()] == [0]
