"""A failure is attributed once, where it happened, and raised on unchanged."""

import asyncio

import pytest

from rollwright import errors
from rollwright.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    MissingExtra,
    RollwrightError,
    SandboxLost,
    boundary,
)


@pytest.mark.parametrize("error", [EngineError("broken"), ValueError("broken"), KeyError("broken")])
def test_the_innermost_boundary_attributes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, boundary("factory", "r-outer"), boundary("engine", "r-1"):
        raise error
    assert caught.value is error
    assert (error.component, error.rollout) == ("engine", "r-1")  # type: ignore[attr-defined]
    assert error.__notes__ == ["in engine, rollout r-1"]


def test_without_a_rollout() -> None:
    error = SandboxLost("gone")
    with pytest.raises(SandboxLost), boundary("sandbox"):
        raise error
    assert (error.component, error.rollout, error.__notes__) == ("sandbox", None, ["in sandbox"])


def test_a_second_error_is_attributed_where_it_arose() -> None:
    with pytest.raises(EngineError) as caught, boundary("factory"):
        try:
            with boundary("sandbox", "r-1"):
                raise SandboxLost("gone")
        except SandboxLost as error:
            raise EngineError("because of it") from error
    assert caught.value.component == "factory"
    assert isinstance(caught.value.__cause__, SandboxLost) and caught.value.__cause__.component == "sandbox"


@pytest.mark.parametrize("end", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_being_stopped_is_no_failure(end: type[BaseException]) -> None:
    with pytest.raises(end) as caught, boundary("engine"):
        raise end
    assert not hasattr(caught.value, "component") and not hasattr(caught.value, "__notes__")


def test_nothing_happens_without_a_failure() -> None:
    with boundary("engine"):
        value = 1
    assert value == 1


def test_every_error_is_in_the_tree_that_the_docstring_draws() -> None:
    tree = errors.__doc__ or ""
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, RollwrightError)]
    assert len(kinds) > 15
    for kind in kinds:
        (line,) = [line for line in tree.splitlines() if line.lstrip("│├└─ ").split(" ")[0] == kind.__name__]
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        assert depth == len([k for k in kind.__mro__ if issubclass(k, RollwrightError)]) - 1, line
        builtin = [k.__name__ for k in kind.__bases__ if not issubclass(k, RollwrightError)]
        assert all(name in line for name in builtin if name != "Exception"), line


def test_texts_say_what_to_do() -> None:
    assert str(MissingExtra("the trainer", "torch")) == (
        "the trainer needs the extra 'torch': pip install 'rollwright[torch]'"
    )
    late = DeadlineExceeded("tool sql", 2.5)
    assert str(late) == "tool sql did not finish within 2.5 s" and isinstance(late, TimeoutError)
    assert isinstance(ConfigError("x"), ValueError)
