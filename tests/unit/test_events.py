"""The event log keeps what was written, leaves out what was torn, and traces parse as W3C says."""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.events import (
    Event,
    EventLog,
    GroupEnded,
    Logged,
    Noted,
    RunStarted,
    SpanEnded,
    Tail,
    TraceContext,
    read_events,
)
from rollwright.testing.clock import FakeClock
from rollwright.wire import SCHEMA

HEX = "0123456789abcdef"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the example of the recommendation


class Settable(FakeClock):
    """A wall clock that people set back."""

    back = 0.0

    def wall(self) -> float:
        return super().wall() - self.back

    def set_back(self, seconds: float) -> None:
        self.back += seconds


def note(text: str) -> Noted:
    return Noted(level="info", text=text)


def texts(logged: list[Logged]) -> list[str]:
    return [each.event.text for each in logged if isinstance(each.event, Noted)]


@given(st.text(HEX, min_size=32, max_size=32), st.text(HEX, min_size=16, max_size=16))
def test_a_traceparent_round_trips(trace: str, span: str) -> None:
    context = TraceContext(trace, span)
    if trace.strip("0") and span.strip("0"):
        assert TraceContext.parse(context.traceparent) == context
    else:
        with pytest.raises(ValueError, match="without trace or span"):
            TraceContext.parse(context.traceparent)


def test_later_versions_are_read() -> None:
    for header in (f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-03", f"cc-{TRACE}-{SPAN}-01-what-comes"):
        assert TraceContext.parse(header) == TraceContext(TRACE, SPAN)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'1_' * 15}11-{SPAN}-01",
        f"00-+{TRACE[1:]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_other_headers_are_refused(header: str) -> None:
    with pytest.raises(ValueError, match="traceparent"):
        TraceContext.parse(header)


def test_children_stay_in_the_trace() -> None:
    parent = TraceContext.new()
    children = {parent.child().span for _ in range(100)} | {parent.span}
    assert len(children) == 101 and parent.child().trace == parent.trace
    assert TraceContext.new(random.Random(1)) == TraceContext.new(random.Random(1)) != TraceContext.new()
    assert TraceContext.parse(parent.traceparent) == parent


def test_events_come_back_in_order_of_time(tmp_path: Path) -> None:
    clock = FakeClock()
    logs = [EventLog(tmp_path / f"events-{name}.jsonl", clock) for name in ("trainer", "rollout")]
    for number in range(10):
        clock.advance(1.0)
        logs[number % 2].emit(note(str(number)))
    for log in logs:
        log.close()
    found = read_events(tmp_path)
    assert texts(found) == [str(number) for number in range(10)]
    assert [each.wall for each in found] == sorted(each.wall for each in found)
    assert found[0].wall == pytest.approx(FakeClock().wall() + 1.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-5, 5)), max_size=30), st.integers(1, 7))
def test_a_clock_that_was_set_back_changes_no_order_within_a_log(
    written: list[tuple[str, float]], reads: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        clock = Settable()
        logs = {name: EventLog(Path(folder) / f"events-{name}.jsonl", clock) for name in "ab"}
        tail, piecemeal = Tail(Path(folder)), []
        for number, (name, passed) in enumerate(written):
            clock.set_back(-passed)
            logs[name].emit(note(f"{name}{number}"))
            if number % reads == 0:
                for log in logs.values():
                    log.flush()
                piecemeal += texts(tail.read())
        for log in logs.values():
            log.close()
        piecemeal += texts(tail.read())
        for found in (texts(read_events(Path(folder))), piecemeal):
            for name in "ab":
                expected = [f"{name}{number}" for number, (to, _) in enumerate(written) if to == name]
                assert [text for text in found if text[0] == name] == expected


def test_a_later_incarnation_comes_later_whatever_its_clock_says(tmp_path: Path) -> None:
    clock = Settable()
    for incarnation, names in ((0, ("trainer", "rollouts")), (1, ("coupled",))):
        for name in names:
            clock.advance(1.0)
            log = EventLog(tmp_path / f"events-{name}.jsonl", clock)
            log.emit(RunStarted(run="r", process=name, incarnation=incarnation))
            log.emit(note(f"{incarnation} {name}"))
            log.close()
        clock.set_back(3600.0)
    found = [each for each in read_events(tmp_path) if isinstance(each.event, Noted)]
    assert texts(found) == ["0 trainer", "0 rollouts", "1 coupled"]
    assert [(each.process, each.incarnation) for each in found][-1] == ("coupled", 1)


def test_every_kind_of_event_comes_back(tmp_path: Path) -> None:
    events: list[Event] = [
        RunStarted(run="r", process="trainer", incarnation=2),
        SpanEnded(
            trace=TRACE, name="turn", span="a", parent="b", seconds=0.5, attributes={"tokens": [1, None]}
        ),
        GroupEnded(group="g", task="t", kept=False, reason="all wrong", mean=None),
        Noted(level="warning", text="line one\nline two  \r\n\u2028 \u00fc"),
    ]
    log = EventLog(tmp_path / "events-x.jsonl", FakeClock())
    for event in events:
        log.emit(event)
    log.close()
    assert [each.event for each in read_events(tmp_path)] == events
    lines = (tmp_path / "events-x.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["schema"] for line in lines] == [SCHEMA] * len(events)


@given(st.data())
def test_a_torn_last_line_is_left_out_and_nothing_else(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events-x.jsonl"
        log = EventLog(path, FakeClock())
        for number in range(4):
            log.emit(note(str(number)))
        log.close()
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        assert texts(read_events(Path(folder))) == [str(number) for number in range(complete)]


def test_a_tail_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events-x.jsonl"
    log = EventLog(path, FakeClock())
    for number in range(3):
        log.emit(note(str(number)))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(b"")
    tail, seen = Tail(tmp_path), []
    for end in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:end])
        seen += texts(tail.read())
    path.write_bytes(whole)
    seen += texts(tail.read())
    assert seen == ["0", "1", "2"] and tail.read() == []


def test_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events-x.jsonl"
    log = EventLog(path, FakeClock())
    log.emit(note("before"))
    log.close()
    newer = msgspec.json.encode(
        {"schema": SCHEMA + 1, "wall": 0.0, "event": "note", "level": "x", "text": "newer"}
    )
    unknown = msgspec.json.encode({"schema": SCHEMA, "wall": 0.0, "event": "no such event"})
    with path.open("ab") as file:
        file.write(b'{"half": \n' + newer + b"\n" + unknown + b"\n\n7\n\xff\xfe\n")
    log = EventLog(path, FakeClock())
    log.emit(note("after"))
    log.close()
    assert texts(read_events(tmp_path)) == ["before", "after"]


def test_a_writer_after_a_killed_one_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "events-x.jsonl"
    for text in ("one", "two"):
        log = EventLog(path, FakeClock())
        log.emit(note(text))
        log.close()
    assert texts(read_events(tmp_path)) == ["one", "two"] and path.read_bytes().count(b"\n") == 2
    path.write_bytes(path.read_bytes()[:-5])
    log = EventLog(path, FakeClock())
    log.emit(note("three"))
    log.close()
    assert texts(read_events(tmp_path)) == ["one", "three"]


def test_a_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    clock = FakeClock()
    log = EventLog(tmp_path / "events-x.jsonl", clock)
    log.emit(note("one"))
    log.flush()
    assert texts(read_events(tmp_path)) == ["one"]
    log.close()
