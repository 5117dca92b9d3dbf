"""The rule reward: deterministic checks over what a rollout did, said and left behind.

Role: the built-in `Reward`. Neighbours: `layers` turns its parts into a value, `replay` is the twin;
sandboxes of the grader's own come from the provider. Invariants: a score is finite or unscorable with a
reason; an infrastructure failure (a lost sandbox, a hang) is unscorable, never 0; nothing an agent wrote
decides what a check compares with, and database questions are asked in a copy that the agent cannot reach.

`ReturnValue` and `VariableExists` ask the agent's own interpreter, which the agent controls: pair them with
a check that does not.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rollwright.clock import Clock, within
from rollwright.errors import DeadlineExceeded, PluginError, RollwrightError, SandboxError, SandboxLost
from rollwright.plugins import load
from rollwright.reward.base import Scorer
from rollwright.reward.config import RewardConfig
from rollwright.reward.layers import layer, part, passed, value
from rollwright.reward.replay import Replays, Twin, Verdict
from rollwright.reward.text import executed, occurs, same, same_json
from rollwright.sandbox.base import Sandbox, SandboxProvider, Snapshot
from rollwright.types import (
    AnswerEquals,
    AnswerJson,
    AnyCheck,
    CallsSucceed,
    CallStatus,
    Check,
    Environment,
    ExecResult,
    FileHolds,
    Json,
    Part,
    ReturnValue,
    Rollout,
    RowSet,
    Score,
    ScoredBy,
    SqlResult,
    StdoutEquals,
    Task,
    TwinReplay,
    ValuesSeen,
    VariableExists,
)

T = TypeVar("T")


class _Unscorable(Exception):
    """Nothing can be said about this rollout; the text is the reason."""


class RuleReward:
    """Scores by the task's checks. Cheap ones first; the twin only where it can still change the value."""

    def __init__(self, sandboxes: SandboxProvider, config: RewardConfig, clock: Clock) -> None:
        self._sandboxes = sandboxes
        self._config = config
        self._clock = clock
        self._replays = Replays()

    async def score(self, task: Task, rollout: Rollout, sandbox: Sandbox | None) -> Score:
        """The score of `rollout`; `sandbox` is the agent's, after its last action (None where it is lost).

        Unscorable: an outcome that says nothing about the policy, a lost sandbox that a check needs, or
        `seconds` over.
        """
        if not rollout.outcome.scorable:
            return Score.unscorable(rollout.outcome.value)
        grading = _Grading(rollout, sandbox, self._sandboxes, self._config, self._replays, self._clock)
        what = f"scoring {rollout.identity.rollout}"
        try:
            parts = await within(self._clock, grading.parts(task.checks), self._config.seconds, what)
        except (_Unscorable, DeadlineExceeded) as error:
            return Score.unscorable(str(error))
        except SandboxError as error:
            return Score.unscorable(f"sandbox lost while scoring: {error}")
        return Score(value=value(task.checks, parts, self._config), parts=tuple(parts))


@dataclass
class _Grading:
    """One rollout under the checks of its task."""

    rollout: Rollout
    sandbox: Sandbox | None
    sandboxes: SandboxProvider
    config: RewardConfig
    replays: Replays
    clock: Clock

    async def parts(self, checks: Sequence[AnyCheck]) -> list[Part]:
        """One part for each check, in order."""
        made: dict[int, Part] = {}
        for i in sorted(range(len(checks)), key=lambda i: _cost(checks[i])):
            made[i] = await self._part(checks[i], list(made.values()))
        return [made[i] for i in range(len(checks))]

    async def _part(self, check: AnyCheck, before: Sequence[Part]) -> Part:
        if isinstance(check, TwinReplay) and not self._undecided(before):
            return part(check, 0.0, "not run: a cheaper check failed")
        good, detail = await _RULES[type(check)](self, check)
        return part(check, float(good), "" if good else detail)

    def _undecided(self, before: Sequence[Part]) -> bool:
        """Whether a twin can still change the value."""
        if self.config.mode == "strict":
            return passed(before)
        return passed([each for each in before if each.layer == "meaning"])

    # What the rollout itself shows.

    async def calls_succeed(self, check: CallsSucceed) -> Verdict:
        statuses = [result.status for _, result in executed(self.rollout)]
        good = statuses.count(CallStatus.OK)
        last = statuses[-1] if statuses else None
        return good >= check.minimum and last is CallStatus.OK, (
            f"expected at least {check.minimum} ok and the last one ok, "
            f"came {good} of {len(statuses)} calls ok" + (f", the last {last.value}" if last else "")
        )

    async def answer_equals(self, check: AnswerEquals) -> Verdict:
        answer = self.rollout.answer
        return answer is not None and same(answer, check.expected), _expected(check.expected, answer)

    async def answer_json(self, check: AnswerJson) -> Verdict:
        try:
            found: Json = json.loads(self.rollout.answer or "")
            for key in check.path.split(".") if check.path else ():
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (ValueError, LookupError, TypeError, RecursionError):
            lacking = f"answered {_short(self.rollout.answer)}, which has none"
            return False, f"expected {check.path} = {_short(check.expected)}, {lacking}"
        told = f"expected {check.path} = {_short(check.expected)}, answered {_short(found)}"
        return same_json(found, check.expected), told

    async def stdout_equals(self, check: StdoutEquals) -> Verdict:
        printed = [
            result.execution.stdout
            for call, result in executed(self.rollout)
            if call.name == "python" and result.status is CallStatus.OK and result.execution is not None
        ]
        given = printed[-1].strip() if printed else None
        came = "nothing was printed" if given is None else f"printed {_short(given)}"
        return given == check.expected.strip(), f"expected {_short(check.expected.strip())}, {came}"

    async def scored_by(self, check: ScoredBy) -> Verdict:
        answer = self.rollout.answer
        if answer is None:
            return False, f"expected {check.at_least:g} from {check.scorer}, no answer"
        try:
            scorer = _scorer(check.scorer)
            given = await asyncio.to_thread(scorer.score, check.arguments, answer)
        except RollwrightError as error:
            raise _Unscorable(f"scorer '{check.scorer}': {error}") from error
        except Exception as error:  # boundary: somebody else's code on what the agent wrote
            return False, f"{type(error).__name__} on {_short(answer)}"
        told = f"expected at least {check.at_least:g} from {check.scorer}, {given:.2f} for {_short(answer)}"
        return given >= check.at_least, told

    async def values_seen(self, check: ValuesSeen) -> Verdict:
        results = [result for _, result in executed(self.rollout)]
        missing = [each for each in check.values if not any(occurs(each, result) for result in results)]
        seen = len(check.values) - len(missing)
        told = (
            f"expected {len(check.values)} values in results, seen {seen}; never seen: {', '.join(missing)}"
        )
        return not missing, told

    # What it left behind.

    def _agents(self) -> Sandbox:
        if self.sandbox is None:
            raise _Unscorable("the agent's sandbox is lost")
        return self.sandbox

    async def file_holds(self, check: FileHolds) -> Verdict:
        try:
            data = await self._agents().files.read(check.path)
        except OSError as error:
            return False, f"expected the file {check.path}, came {type(error).__name__}"
        held = data.decode("utf-8", "replace").strip()
        wanted = "" if check.text is None else check.text.strip()
        told = f"expected {_short(wanted)} in {check.path}, it holds {_short(held)}"
        return check.text is None or held == wanted, told

    async def return_value(self, check: ReturnValue) -> Verdict:
        result = await self._agents().run_code(check.expression, timeout=self.config.call_seconds)
        good = result.status is CallStatus.OK and (result.value or "None") == check.expected
        told = f"expected {_short(check.expected)} of {_short(check.expression)}"
        return good, f"{told}, came {_short(result.value or 'None')} ({result.status.value})"

    async def variable_exists(self, check: VariableExists) -> Verdict:
        name = check.name
        question = f"{name!r} in globals()"
        if check.type is not None:
            question += f" and type(globals()[{name!r}]).__name__ == {check.type!r}"
        result = await self._agents().run_code(question, timeout=self.config.call_seconds)
        return result.status is CallStatus.OK and result.value == "True", (
            f"expected the variable {name}"
            + (f" of type {check.type}" if check.type else "")
            + ", there is none"
        )

    async def sql_result(self, check: SqlResult) -> Verdict:
        agents = self._agents()

        async def ask() -> ExecResult:
            left = await agents.snapshot()
            try:
                async with self._own(snapshot=await self._taken_over(left)) as copy:
                    return await copy.sql(check.query, timeout=self.config.call_seconds)
            finally:
                await left.drop()

        try:
            result = await self._agents_time(ask())
        except SandboxLost:
            raise
        except (SandboxError, OSError, ValueError) as error:
            # What the agent left cannot be copied or opened: its doing, so a failed check and not unscorable.
            return False, f"expected {len(check.rows)} rows, came {type(error).__name__}: {error}"
        found = result.rows
        if result.status is not CallStatus.OK or found is None:
            told = f"expected {len(check.rows)} rows, came {result.status.value}"
            return False, f"{told}: {_short(result.stderr)}"
        return _rows_equal(found, check), (
            f"expected {len(check.rows)} rows of {', '.join(check.columns)}: {_short(check.rows[:3])}, "
            f"came {len(found.rows)} of {', '.join(found.columns)}: {_short(found.rows[:3])}"
        )

    async def twin_replay(self, check: TwinReplay) -> Verdict:
        calls, answer = executed(self.rollout), self.rollout.answer
        if answer is None:
            return False, _expected(check.expected, None)

        async def replay() -> Verdict:
            async with self._own(check.environment) as sandbox:
                twin = Twin(check, sandbox, self.config.call_seconds)
                try:
                    good, given = await self._agents_time(twin.answers(calls, answer))
                    came = _expected(check.expected, given) if given is not None else twin.ended
                except DeadlineExceeded as error:
                    good, came = False, str(error)
            return good, f"on the twin: {came}; replayed {twin.replayed} of {len(calls)} calls"

        return await self.replays.verdict(check, calls, answer, replay)

    async def _agents_time(self, work: Awaitable[T]) -> T:
        """Wait for what runs the agent's own writing. It gets less than the whole score does: time that the
        agent uses up is a failed check (`DeadlineExceeded`, a `TimeoutError`), not "unscorable"."""
        return await within(self.clock, work, 0.8 * self.config.seconds, "what the agent wrote")

    async def _taken_over(self, left: Snapshot) -> Snapshot:
        """A snapshot of the agent's sandbox as one of the grader's own provider: by way of a file, which is
        read as untrusted."""
        with tempfile.TemporaryDirectory(prefix="rollwright-grader-") as folder:
            return await self.sandboxes.load(await left.save(Path(folder)))

    @asynccontextmanager
    async def _own(
        self, environment: Environment | None = None, snapshot: Snapshot | None = None
    ) -> AsyncIterator[Sandbox]:
        """A sandbox of the grader's own, gone afterwards, and the snapshot with it."""
        owner = f"grader/{self.rollout.identity.rollout}"
        try:
            try:
                sandbox = await self.sandboxes.create(environment, owner=owner, snapshot=snapshot)
            except DeadlineExceeded as error:  # an `OSError` too, which would be taken for the agent's doing
                raise _Unscorable(f"no room for the grader's sandbox: {error}") from error
            try:
                yield sandbox
            finally:
                await sandbox.kill()
        finally:
            if snapshot is not None:
                await snapshot.drop()


Rule = Callable[[_Grading, Any], Awaitable[Verdict]]

_RULES: dict[type[Check], Rule] = {
    CallsSucceed: _Grading.calls_succeed,
    AnswerEquals: _Grading.answer_equals,
    AnswerJson: _Grading.answer_json,
    StdoutEquals: _Grading.stdout_equals,
    ValuesSeen: _Grading.values_seen,
    ScoredBy: _Grading.scored_by,
    FileHolds: _Grading.file_holds,
    ReturnValue: _Grading.return_value,
    VariableExists: _Grading.variable_exists,
    SqlResult: _Grading.sql_result,
    TwinReplay: _Grading.twin_replay,
}
"""Cheapest first; the twin last."""


@cache
def _scorer(name: str) -> Scorer:
    """The scorer registered as `name`. Data never names a module: what it says must not be imported."""
    if ":" in name:
        raise PluginError(f"a check may only name a registered scorer, not {name!r}")
    scorer: Scorer = load("rollwright.scorers", name)()
    return scorer


def _cost(check: Check) -> int:
    """Its place in `_RULES`; refuses a kind that nobody knows."""
    layer(check)
    return list(_RULES).index(type(check))


def _rows_equal(found: RowSet, check: SqlResult) -> bool:
    ours = [_typed(row) for row in found.rows]
    expected = [_typed(row) for row in check.rows]
    if not check.ordered:
        ours, expected = sorted(ours), sorted(expected)
    return found.columns == check.columns and ours == expected


def _typed(row: Sequence[Json]) -> tuple[str, ...]:
    """A row that can be ordered and compared: 1 equals 1.0 and differs from "1"."""
    return tuple(
        repr(float(each))
        if isinstance(each, int | float) and not isinstance(each, bool)
        else json.dumps(each)
        for each in row
    )


def _expected(expected: str, answer: str | None) -> str:
    came = "no answer" if answer is None else f"answered {_short(answer)}"
    return f"expected {_short(expected)}, {came}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
