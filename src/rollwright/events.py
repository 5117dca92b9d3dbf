"""What happened, as typed events, and the trace context that joins it all.

Role: the run folder's log (`events-<process>.jsonl`) and W3C trace context. Neighbours: everyone emits;
report, trace and dashboard only read. Invariants: an event is written before what follows from it is shown;
each line is one JSON object with `schema`; a trace id is made where a rollout starts, and never changes.
"""

from __future__ import annotations

import os
import random
import re
import secrets
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from rollwright.clock import Clock, SystemClock
from rollwright.types import Json
from rollwright.wire import SCHEMA

FLUSH_SECONDS = 0.2
"""How long an event may stay in the writer's buffer while others follow."""


_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?"
)


class TraceContext(msgspec.Struct, frozen=True):
    """W3C trace context: 32 hex digits of trace, 16 of span."""

    trace: str
    span: str

    @classmethod
    def new(cls, rng: random.Random | None = None) -> TraceContext:
        """A new trace; with `rng` a repeatable one."""
        if rng is None:
            return cls(secrets.token_hex(16), secrets.token_hex(8))
        return cls(f"{rng.getrandbits(128) or 1:032x}", f"{rng.getrandbits(64) or 1:016x}")

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace, secrets.token_hex(8))

    @property
    def traceparent(self) -> str:
        """The header value, https://www.w3.org/TR/trace-context/."""
        return f"00-{self.trace}-{self.span}-01"

    @classmethod
    def parse(cls, header: str) -> TraceContext:
        """From a `traceparent` header.

        Raises:
            ValueError: not of that form.
        """
        found = _TRACEPARENT.fullmatch(header)
        if not found or found["version"] == "ff" or (found["more"] and found["version"] == "00"):
            raise ValueError(f"not a traceparent: {header!r}")
        if not (found["trace"].strip("0") and found["span"].strip("0")):
            raise ValueError(f"a traceparent without trace or span: {header!r}")
        return cls(found["trace"], found["span"])


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of all events; `wall` is filled in by the log."""

    trace: str = ""


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """A process of a run began."""

    run: str
    process: str
    incarnation: int = 0
    versions: dict[str, str] = {}
    """Of what it computes with: rollwright, torch, Python."""


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """The trainer took a run up again from its last commit."""

    step: int
    version: str


class SpanEnded(Event, frozen=True, kw_only=True, tag="span"):
    """One traced piece of work: a model turn, a tool call, a rollout, a train step."""

    name: str
    span: str
    parent: str
    seconds: float
    attributes: dict[str, Json] = {}


class RolloutEnded(Event, frozen=True, kw_only=True, tag="rollout"):
    """A rollout ended with its outcome, and what it scored where it was scored."""

    rollout: str
    group: str
    task: str
    outcome: str
    value: float | None
    turns: int
    sampled: int
    seconds: float
    error: str | None = None
    parts: dict[str, float] = {}
    job: str = "train"
    """`train` or `eval`."""


class GroupEnded(Event, frozen=True, kw_only=True, tag="group"):
    """A group was queued, or dropped with its reason."""

    group: str
    task: str
    kept: bool
    reason: str
    mean: float | None
    attempt: int = 0


class StepEnded(Event, frozen=True, kw_only=True, tag="step"):
    """An optimiser step was committed, with its metrics (slash-separated names)."""

    step: int
    incarnation: int
    metrics: dict[str, float]


class WeightsPushed(Event, frozen=True, kw_only=True, tag="weights"):
    """An engine took new weights; `gap` is the largest difference to the trainer's probe logprobs."""

    version: str
    digest: str
    gap: float
    seconds: float


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """A policy was evaluated on held-out tasks."""

    label: str
    mode: str
    successes: int
    trials: int
    low: float
    high: float
    metrics: dict[str, float] = {}
    step: int | None = None
    """Optimiser steps behind the policy that was measured."""
    incarnation: int = 0
    rollouts: str = ""
    """What the ids of its rollouts begin with: `0-after-sampled`."""


class Metrics(Event, frozen=True, kw_only=True, tag="metrics"):
    """Live figures of one process (slash-separated names)."""

    process: str
    values: dict[str, float]
    what: str = ""
    """What is under way, where the figures are its progress: `after, sampled`."""


class Noted(Event, frozen=True, kw_only=True, tag="note"):
    """Something a person should know."""

    level: str
    text: str


class LeaseChanged(Event, frozen=True, kw_only=True, tag="lease"):
    """A worker took, lost or gave back a lease."""

    lease: str
    kind: str
    change: str


AnyEvent = (
    RunStarted
    | Resumed
    | SpanEnded
    | RolloutEnded
    | GroupEnded
    | StepEnded
    | WeightsPushed
    | Evaluated
    | Metrics
    | Noted
    | LeaseChanged
)


class Sink(Protocol):
    """Whoever takes events."""

    def emit(self, event: Event) -> None:
        """Take one event; must not block for long, must not raise for a well-formed event."""


class NullSink:
    """Forgets everything."""

    def emit(self, event: Event) -> None:
        return


class ListSink:
    """Keeps events in memory, for tests."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


class EventLog:
    """Appends events to one JSONL file of the run folder; one writer per file, so lines never interleave."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock or SystemClock()
        self._file: IO[bytes] = path.open("a+b")
        if self._file.tell() and _last_byte(self._file) != b"\n":
            self._file.write(b"\n")  # the writer before was killed within a line
        self._encoder = msgspec.json.Encoder()
        self._flushed = self._clock.now()

    def emit(self, event: Event) -> None:
        body: dict[str, Any] = {"schema": SCHEMA, "wall": round(self._clock.wall(), 6)}
        body.update(msgspec.to_builtins(event))
        self._file.write(self._encoder.encode(body) + b"\n")
        now = self._clock.now()
        if now - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; the log takes nothing afterwards."""
        self._file.close()


def _last_byte(file: IO[bytes]) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


EVALUATIONS = ("eval-", "evaluation")
"""How the names of processes begin that measure a run from outside."""


class Logged(msgspec.Struct, frozen=True):
    """An event with the wall time (seconds since the epoch) at which it was written, the process that wrote
    it, and the incarnation of the run that this process belonged to."""

    wall: float
    event: AnyEvent
    process: str = ""
    incarnation: int = 0

    @property
    def aside(self) -> bool:
        """Whether it was written by `rollwright eval`, which is no part of the run."""
        return self.process.startswith(EVALUATIONS)


class Tail:
    """Reads what was appended to the logs of a run folder since the last call; a line not finished yet
    waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[Path, int] = {}
        self._reached: dict[Path, tuple[int, float]] = {}
        self._decoder = msgspec.json.Decoder(AnyEvent)
        self._wall = msgspec.json.Decoder(_Stamp)

    def read(self) -> list[Logged]:
        """New events of all processes: those of one process in the order in which it wrote them, those of
        several by incarnation and wall time. A line that is no event of this schema is left out.

        A wall clock may be set back: within a log an event is never before the one that it follows.
        """
        found: list[tuple[tuple[int, float], Logged]] = []
        for path in sorted(self.folder.glob("events-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            process = path.name.removeprefix("events-").removesuffix(".jsonl")
            for line in whole.splitlines():
                try:
                    stamp = self._wall.decode(line)
                    if stamp.schema != SCHEMA:
                        continue
                    event = self._decoder.decode(line)
                except msgspec.DecodeError:
                    continue
                place = self._placed(path, stamp.wall, event)
                found.append((place, Logged(stamp.wall, event, process, place[0])))
        return [logged for _, logged in sorted(found, key=lambda each: each[0])]

    def _placed(self, path: Path, wall: float, event: AnyEvent) -> tuple[int, float]:
        """(incarnation, wall time) by which an event is sorted; neither falls within one log."""
        incarnation, latest = self._reached.get(path, (0, wall))
        if isinstance(event, RunStarted) and event.incarnation > incarnation:
            incarnation, latest = event.incarnation, wall
        self._reached[path] = place = (incarnation, max(latest, wall))
        return place


class _Stamp(msgspec.Struct):
    wall: float
    schema: int


def read_events(folder: Path) -> list[Logged]:
    """Every event of a run folder in the order of `Tail`; a torn last line (a killed writer) is left out."""
    return Tail(folder).read()
