"""One rollout as it happens: speak, act, observe, until there is an outcome.

Role: the loop of `ToolAgent`. Neighbours: engine, door, template. Invariants: tokens are appended, never
re-encoded; where the template rewrites history a new row begins, and what was sampled stays sampled only in
the row that it was sampled in; every action goes through `session.door`; what the policy did wrong becomes
an observation, what the infrastructure did wrong goes to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from rollwright.agents.base import Continuation, Conversation, Session
from rollwright.agents.calls import ParsedCall, parse
from rollwright.agents.config import AgentConfig
from rollwright.agents.enforced import enforced
from rollwright.agents.rows import RowBuilder
from rollwright.clock import within
from rollwright.errors import ContextOverflow, DeadlineExceeded
from rollwright.events import SpanEnded
from rollwright.tools.base import Action
from rollwright.types import (
    CallStatus,
    Completion,
    Constraint,
    Finish,
    Outcome,
    Provenance,
    Rollout,
    Row,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Turn,
)


@dataclass(frozen=True)
class _End:
    """The outcome, and the answer where there is one."""

    outcome: Outcome
    answer: str | None = None


@dataclass
class Episode:
    """One rollout of `task`; `run` may be called once."""

    task: Task
    session: Session
    config: AgentConfig
    row: RowBuilder = field(default_factory=RowBuilder)
    """The row that grows."""
    done: list[Row] = field(default_factory=list)
    """Rows that a rewritten history has ended."""
    turns: list[Turn] = field(default_factory=list)
    history: list[ToolCall] = field(default_factory=list)
    specs: tuple[ToolSpec, ...] = ()
    constraint: Constraint | None = None
    """What decoding is held to."""
    talk: Conversation = field(init=False)

    def __post_init__(self) -> None:
        self.talk = self.session.template.conversation()

    async def run(self) -> Rollout:
        """From the first prompt to the outcome.

        Raises:
            SandboxLost, EngineError: the infrastructure failed.
        """
        began = self.session.clock.now()
        self.session.draft.rows = self._rows
        self.session.draft.turns = lambda: tuple(self.turns)
        self.specs = self.session.door.specs(self.task.tools)
        self.constraint = enforced(self.specs) if self.config.calls == "enforced" else None
        prompt = self.talk.start(self.task.messages, self.specs)
        self.row.given(prompt, Provenance.PROMPT)
        end = None
        while end is None:
            end = await self._timed_turn()
        return Rollout(
            identity=self.session.identity,
            rows=self._rows(),
            turns=tuple(self.turns),
            outcome=end.outcome,
            answer=end.answer,
            started=self.session.clock.wall() - (self.session.clock.now() - began),
            seconds=self.session.clock.now() - began,
        )

    def _rows(self) -> tuple[Row, ...]:
        return (*self.done, self.row.row())

    async def _timed_turn(self) -> _End | None:
        """One turn within its deadline and the rollout's."""
        clock, limits = self.session.clock, self.task.limits
        left = self.session.deadline - clock.now()
        what = f"turn {len(self.turns)} of {self.session.identity.rollout}"
        try:
            return await within(clock, self._turn(), min(limits.turn_seconds, left), what)
        except DeadlineExceeded:
            late = clock.now() >= self.session.deadline
            return _End(Outcome.ROLLOUT_TIMEOUT if late else Outcome.TURN_TIMEOUT)
        except ContextOverflow:
            return _End(Outcome.CONTEXT_FULL)

    async def _turn(self) -> _End | None:
        """Speak, act, observe; None where another turn follows."""
        limits, template = self.task.limits, self.session.template
        began = self.session.clock.now()
        room = min(limits.turn_tokens, limits.max_tokens - len(self.row))
        if room < 1:
            return _End(Outcome.CONTEXT_FULL)
        completion = await self._speak(room)
        turn = self._record(completion, self.session.clock.now() - began)
        if turn.finish is Finish.ABORT:
            return _End(Outcome.REVOKED)
        closed = bool(len(completion.tokens)) and int(completion.tokens[-1]) in template.stop
        number, rollout = len(self.turns) - 1, self.session.identity.rollout
        parsed = parse(
            turn.text, self.specs, rollout=rollout, turn=number, cut=not closed, marks=template.marks
        )
        if parsed.calls:
            results = await self._act(parsed.calls)
            contents = [result.content for result in results]
            if any(result.terminated for result in results):
                return _End(Outcome.TERMINATED)
        elif closed:
            return _End(Outcome.ANSWERED, turn.text.strip())
        else:
            contents = [f"error: turn cut at {len(completion.tokens)} tokens"]
        return self._observe(self.talk.observe(completion.tokens.tolist(), contents, closed=closed))

    async def _speak(self, room: int) -> Completion:
        session = self.session
        sampling = replace(
            session.sampling, max_tokens=room, stop=session.template.stop, constraint=self.constraint
        )
        name = session.identity.rollout
        return await session.engine.generate(
            self.row.tokens(), sampling, request=f"{name}/{len(self.turns)}", session=name
        )

    def _record(self, completion: Completion, seconds: float) -> Turn:
        """Append the completion to the row, and its turn (without calls yet)."""
        session = self.session
        start, end = self.row.sampled(completion)
        turn = Turn(
            row=len(self.done),
            start=start,
            end=end,
            text=session.template.text(completion.tokens.tolist()),
            finish=completion.finish,
            cached=completion.cached,
            prompt_tokens=completion.prompt_tokens,
            model_seconds=seconds,
        )
        self.turns.append(turn)
        span = session.trace.child()
        said = {"turn": len(self.turns) - 1, "tokens": end - start, "finish": turn.finish.value}
        session.events.emit(
            SpanEnded(
                trace=span.trace,
                name="model_turn",
                span=span.span,
                parent=session.trace.span,
                seconds=seconds,
                attributes={"rollout": session.identity.rollout, **said},
            )
        )
        return turn

    async def _act(self, calls: tuple[ParsedCall, ...]) -> list[ToolResult]:
        """Make the calls one after another; the turn's record grows with each result."""
        began, results = self.session.clock.now(), []
        for index, parsed in enumerate(calls):
            problem = parsed.problem
            if index >= self.config.calls_per_turn:
                problem = f"more than {self.config.calls_per_turn} calls in a turn"
            if problem:
                content = f"error: {problem}"
                result = ToolResult(call=parsed.call.id, status=CallStatus.MALFORMED, content=content)
            else:
                result = self._shown(await self._invoke(parsed.call))
            results.append(result)
            self.turns[-1] = replace(
                self.turns[-1],
                calls=tuple(each.call for each in calls[: index + 1]),
                results=tuple(results),
                tool_seconds=self.session.clock.now() - began,
            )
            if result.terminated:
                break
        return results

    async def _invoke(self, call: ToolCall) -> ToolResult:
        session = self.session
        action = Action(
            call=call,
            identity=session.identity,
            task=self.task,
            sandbox=session.sandbox,
            trace=session.trace,
            timeout=self.task.limits.tool_seconds,
            history=tuple(self.history),
        )
        self.history.append(call)
        return await session.door.invoke(action)

    def _shown(self, result: ToolResult) -> ToolResult:
        """`result` as the model sees it: not longer than the limit."""
        limit, content = self.config.observation_characters, result.content
        if len(content) <= limit:
            return result
        return replace(result, content=f"{content[:limit]}… ({len(content) - limit} more characters)")

    def _observe(self, given: Continuation) -> _End | None:
        """Append what the environment says, if the model can still answer to it."""
        limits = self.task.limits
        size = len(given.tokens) if given.fork else len(self.row) + len(given.tokens)
        if size >= limits.max_tokens:
            return _End(Outcome.CONTEXT_FULL)
        if len(self.turns) >= limits.max_turns:
            return _End(Outcome.MAX_TURNS)
        if given.fork:
            self.done.append(self.row.row())
            self.row = RowBuilder()
            self.row.given(given.tokens, Provenance.PROMPT)
        else:
            self.row.given(given.tokens[: given.injected], Provenance.INJECTED)
            self.row.given(given.tokens[given.injected :], Provenance.TOOL)
        return None
