"""Observations stay short, regular and one-line where they are errors."""

from hypothesis import given
from hypothesis import strategies as st

from rollwright.tools import observe
from rollwright.tools.base import ERROR_CHARACTERS
from rollwright.types import CallStatus, ExecResult, RowSet, ToolCall

CALL = ToolCall(id="1", name="sql", arguments={})


@given(text=st.text(), status=st.sampled_from(CallStatus))
def test_an_error_is_one_short_line(text: str, status: CallStatus) -> None:
    result = observe.executed(CALL, ExecResult(status=status, stderr=text, exit_code=1), "fine")
    if status is CallStatus.OK:
        assert result.content == "fine"
    else:
        assert result.content.startswith("error: ")
        assert len(result.content) <= ERROR_CHARACTERS
        assert len(result.content.splitlines()) == 1


@given(rows=st.lists(st.tuples(st.integers() | st.none(), st.integers()), max_size=400))
def test_a_table_is_rows_by_columns(rows: list[tuple[int | None, int]]) -> None:
    shown = observe.table(RowSet(columns=("a", "b"), rows=tuple(rows)))
    assert len(shown) <= observe.OBSERVATION_CHARACTERS
    if not rows:
        assert shown == "none"
    elif not shown.endswith("…"):
        back = [line.split("|") for line in shown.split("\n")]
        assert back == [["NULL" if cell is None else str(cell) for cell in row] for row in rows]
