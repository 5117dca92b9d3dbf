"""Tasks, tools, actions and what is checked.

Role: the wire half of a task; behaviour lives in `tasks`, `tools` and `reward`. Neighbours: agents, tools,
rewards. Invariant: plain data; loading a task executes nothing.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from rollwright.types.record import Json, Record


class Message(Record, frozen=True, kw_only=True):
    """One message of a conversation, as text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SideEffect(enum.Enum):
    """What repeating a call would do."""

    NONE = "none"
    IDEMPOTENT = "idempotent"
    ONCE = "once"


class ToolSpec(Record, frozen=True, kw_only=True):
    """A tool as the model sees it; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Json]
    side_effect: SideEffect = SideEffect.ONCE


class ToolCall(Record, frozen=True, kw_only=True):
    """A call parsed from sampled text. `id` is the action id: its target drops repeats."""

    id: str
    name: str
    arguments: dict[str, Json]
    raw: str = ""


class CallStatus(enum.Enum):
    """How one call ended; each is an observation for the model, none is a crash."""

    OK = "ok"
    ERROR = "error"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    DENIED = "denied"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    LOST = "lost"


class RowSet(Record, frozen=True, kw_only=True):
    """A SQL result set."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Json, ...], ...]


class ExecResult(Record, frozen=True, kw_only=True):
    """What running something in a sandbox gave. `value` is the repr of a last expression, if any."""

    status: CallStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    value: str | None = None
    rows: RowSet | None = None
    seconds: float = 0.0


class ToolResult(Record, frozen=True, kw_only=True):
    """What the model is told (`content`) and what rewards look at (`execution`)."""

    call: str
    status: CallStatus
    content: str
    execution: ExecResult | None = None
    seconds: float = 0.0
    repeated: bool = False
    """The action id was seen before: this is the first result again."""
    terminated: bool = False
    """A guard ended the rollout with this call, which was not executed; the agent stops (`TERMINATED`)."""


class File(Record, frozen=True, kw_only=True):
    """A text file put into the sandbox before the rollout starts."""

    path: str
    text: str


class Environment(Record, frozen=True, kw_only=True):
    """What a task's sandbox holds at the start: files, and one SQLite database made by `sql`."""

    files: tuple[File, ...] = ()
    sql: str = ""


class Check(Record, frozen=True, kw_only=True, tag_field="kind"):
    """Base of what a reward looks at. Layers: `status` (it ran), `meaning` (the output is right),
    `intermediate`."""

    weight: float = 1.0


class CallsSucceed(Check, frozen=True, kw_only=True, tag="calls_succeed"):
    """status: at least `minimum` calls ended ok, and the last call did."""

    minimum: int = 1


class AnswerEquals(Check, frozen=True, kw_only=True, tag="answer_equals"):
    """meaning: the final answer equals `expected` after stripping and case folding; numbers compare as
    numbers."""

    expected: str


class AnswerJson(Check, frozen=True, kw_only=True, tag="answer_json"):
    """meaning: the final answer is JSON whose field at `path` (dot-separated) equals `expected`."""

    path: str
    expected: Json


class StdoutEquals(Check, frozen=True, kw_only=True, tag="stdout_equals"):
    """meaning: the last successful Python call printed `expected` (stripped)."""

    expected: str


class FileHolds(Check, frozen=True, kw_only=True, tag="file_holds"):
    """meaning: after the rollout the file exists; where `text` is given it holds exactly that (stripped)."""

    path: str
    text: str | None = None


class ReturnValue(Check, frozen=True, kw_only=True, tag="return_value"):
    """meaning: `expression`, evaluated in the agent's interpreter after the rollout, has the repr
    `expected`."""

    expression: str
    expected: str


class SqlResult(Check, frozen=True, kw_only=True, tag="sql_result"):
    """meaning: `query` on the agent's database after the rollout gives these columns and rows."""

    query: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Json, ...], ...]
    ordered: bool = False


class ValuesSeen(Check, frozen=True, kw_only=True, tag="values_seen"):
    """intermediate: each value occurred as a cell or output of some successful call."""

    values: tuple[str, ...]


class VariableExists(Check, frozen=True, kw_only=True, tag="variable_exists"):
    """intermediate: the agent's interpreter holds a variable of that name (and type name, where given)."""

    name: str
    type: str | None = None


class ScoredBy(Check, frozen=True, kw_only=True, tag="scored_by"):
    """meaning: the scorer registered as `scorer` (entry-point group `rollwright.scorers`) gives the final
    answer at least `at_least`; `arguments` are the scorer's own."""

    scorer: str
    arguments: dict[str, Json] = msgspec.field(default_factory=dict)
    at_least: float = 1.0


class TwinReplay(Check, frozen=True, kw_only=True, tag="twin_replay"):
    """meaning: the same calls, replayed on a second instance, lead to that instance's answer.

    Literals that came from the question (`renamed`: ours → the twin's) or from an earlier result are
    replaced by what the twin has in that place. An answer that did not come out of the calls stays as it
    is, and is wrong there.
    """

    environment: Environment
    renamed: dict[str, str]
    expected: str


REPLAYED = ("sql", "python")
"""Tools whose calls `TwinReplay` replays."""


AnyCheck = (
    CallsSucceed
    | AnswerEquals
    | AnswerJson
    | StdoutEquals
    | FileHolds
    | ReturnValue
    | SqlResult
    | ValuesSeen
    | VariableExists
    | ScoredBy
    | TwinReplay
)


class TaskLimits(Record, frozen=True, kw_only=True):
    """Limits of one rollout of a task; seconds are wall time."""

    max_turns: int = 8
    max_tokens: int = 512
    """Tokens of the whole row, prompt included."""
    turn_tokens: int = 64
    tool_seconds: float = 5.0
    turn_seconds: float = 30.0
    rollout_seconds: float = 120.0


class Task(Record, frozen=True, kw_only=True):
    """One task: messages, the tools allowed, the environment, what is checked."""

    id: str
    set: str
    messages: tuple[Message, ...]
    tools: tuple[str, ...]
    checks: tuple[AnyCheck, ...]
    environment: Environment = Environment()
    limits: TaskLimits = TaskLimits()
    tags: dict[str, str] = msgspec.field(default_factory=dict)
