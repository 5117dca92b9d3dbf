"""The twin: would the same calls have answered the same question on another instance?

Role: the check `TwinReplay`. Neighbours: `rules` runs it when cheaper checks have passed; a sandbox of the
grader's own executes. Invariant: nothing of the agent's sandbox is used, only the text of its calls and
what they gave.

Substitution. In a call, a quoted literal that holds a name of the question (`renamed`) gets the twin's
name; one that holds a value of an earlier result gets what the twin has in the same place (row and column;
line and word of an output), the newest result first. In SQL the same holds for numbers, but not after LIMIT
and OFFSET. The answer is treated like a literal. Whatever came neither from the question nor from a result
stays as it is, and is wrong on the twin.

Not covered: calls of other tools than `sql` and `python` are not replayed; an agent that reads a whole
table and picks by eye is judged by place, not by reasoning.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rollwright.reward.text import Place, places, same
from rollwright.sandbox.base import Sandbox
from rollwright.types import CallStatus, ExecResult, ToolCall, ToolResult, TwinReplay
from rollwright.wire import encode

Verdict = tuple[bool, str]
"""Whether a check passed, and what was expected and what came."""

Calls = Sequence[tuple[ToolCall, ToolResult]]

_QUOTED = r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\""
_LITERAL = {
    "sql": re.compile(rf"(?P<text>{_QUOTED})|(?<![\w.])(?P<number>\d+(?:\.\d+)?)(?![\w.])"),
    "python": re.compile(rf"(?P<text>{_QUOTED})"),
}
_WINDOW = re.compile(r"\b(LIMIT|OFFSET)\s*\Z", re.IGNORECASE)
_RAN = (CallStatus.OK, CallStatus.ERROR)


class Twin:
    """Replays one rollout's calls; `substitute` knows what was seen so far on both sides."""

    def __init__(self, check: TwinReplay, sandbox: Sandbox, call_seconds: float) -> None:
        self._check = check
        self._sandbox = sandbox
        self._seconds = call_seconds
        self._seen: list[tuple[dict[str, Place], dict[Place, str]]] = []
        self.replayed = 0
        """Calls that ran here so far."""
        self.ended = ""
        """Why a replay led to no answer."""

    async def answers(self, calls: Calls, answer: str) -> tuple[bool, str | None]:
        """Whether the calls lead to the twin's answer there, and what they led to: None where a call ended
        the replay."""
        for call, result in calls:
            if call.name in _LITERAL and result.status in _RAN and result.execution is not None:
                theirs = await self._replay(call)
                if theirs.status in (CallStatus.TIMEOUT, CallStatus.LOST):
                    # An agent chooses its calls: one that hangs or dies here must not make it unscorable.
                    self.ended = f"call {call.id} ended with {theirs.status.value}"
                    return False, None
                self.replayed += 1
                self._saw(result.execution, theirs)
        given = self.substitute(answer.strip())
        return same(given, self._check.expected), given

    async def _replay(self, call: ToolCall) -> ExecResult:
        code = next((value for value in call.arguments.values() if isinstance(value, str)), "")
        pattern = _LITERAL[call.name]
        rewritten = pattern.sub(self._literal, code)
        do = self._sandbox.sql if call.name == "sql" else self._sandbox.run_code
        return await do(rewritten, timeout=self._seconds)

    def _literal(self, found: re.Match[str]) -> str:
        """The twin's form of one literal of a call."""
        text = found.group()
        if found.group("text") is None:
            after_limit = _WINDOW.search(found.string[: found.start()])
            return text if after_limit else self.substitute(text)
        inner = text[1:-1]
        whole = self.substitute(inner)
        if whole != inner:
            return text[0] + whole + text[-1]
        return text[0] + re.sub(r"\w+", lambda word: self.substitute(word.group()), inner) + text[-1]

    def substitute(self, value: str) -> str:
        """What the twin has in the place where `value` came from; `value` itself where it came from
        nowhere."""
        if value in self._check.renamed:
            return self._check.renamed[value]
        for ours, theirs in reversed(self._seen):
            for seen, place in ours.items():
                if same(seen, value):
                    return theirs.get(place, value)
        return value

    def _saw(self, ours: ExecResult, theirs: ExecResult) -> None:
        first: dict[str, Place] = {}
        for place, value in places(ours):
            if value:
                first.setdefault(value, place)
        self._seen.append((first, dict(places(theirs))))


@dataclass
class _Known:
    """One replay: done, or under way by whoever holds the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    verdict: Verdict | None = None


class Replays:
    """The newest verdicts: rollouts of one group often make the same calls, and are then replayed once.

    Only SQL is taken for repeatable; with a `python` call in it a rollout is always replayed.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    async def verdict(
        self, check: TwinReplay, calls: Calls, answer: str, replay: Callable[[], Awaitable[Verdict]]
    ) -> Verdict:
        """What `replay` gives, or gave for the same calls with the same results."""
        if any(call.name == "python" for call, _ in calls):
            return await replay()
        made = [(call.name, call.arguments, result.status, _timeless(result)) for call, result in calls]
        key = encode((check, made, answer))
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        while len(self._known) > self._keep:
            self._known.popitem(last=False)
        async with known.lock:
            if known.verdict is None:
                known.verdict = await replay()
            return known.verdict


def _timeless(result: ToolResult) -> ExecResult | None:
    return None if result.execution is None else replace(result.execution, seconds=0.0)
