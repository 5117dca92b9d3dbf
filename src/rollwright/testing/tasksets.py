"""What every task set must do, as checks over a `make` callable.

Role: the conformance suite of `tasks.base.TaskSet`. Neighbours: `tests/contract` runs it over our sets, a
plug-in's tests over theirs. Invariant: only the first `NUMBERS` tasks of each split are asked for.

Use: `@pytest.mark.parametrize("check", CHECKS)`, then `check(make)`.
"""

from __future__ import annotations

from collections.abc import Callable

from rollwright.plugins import PartConfig
from rollwright.tasks.base import Split, TaskSet
from rollwright.types import Task
from rollwright.wire import decode, encode

Make = Callable[[], TaskSet]

NUMBERS = 50
SPLITS: tuple[Split, ...] = ("train", "heldout")


def tasks(tasks: TaskSet, split: Split) -> list[Task]:
    """The first tasks of a split."""
    return [tasks.task(split, number) for number in range(NUMBERS)]


def repeats(make: Make) -> None:
    """The same (split, number) is the same task for ever, whatever was asked for before. Where `make` is the
    method `build` of a configuration, it is the same one in another interpreter too, with another hash seed:
    a set of text, for one, is iterated in another order there."""
    one, two = make(), make()
    for split in SPLITS:
        assert [encode(task) for task in tasks(one, split)] == [
            encode(two.task(split, number)) for number in reversed(range(NUMBERS))
        ][::-1]
    from rollwright.tasks.elsewhere import differing, movable

    config = getattr(make, "__self__", None)
    if isinstance(config, PartConfig) and movable(config):
        other = differing(config, NUMBERS)
        assert not other, f"other tasks in another process, {other[0]} among them"


def storable(make: Make) -> None:
    """A task survives the wire."""
    for split in SPLITS:
        for task in tasks(make(), split):
            assert decode(Task, encode(task)) == task


def disjoint(make: Make) -> None:
    """Ids name one task, and no held-out conversation occurs in training."""
    made = make()
    train, heldout = tasks(made, "train"), tasks(made, "heldout")
    for task in train:
        assert all(other == task for other in [*train, *heldout] if other.id == task.id)
    assert not {task.messages for task in train} & {task.messages for task in heldout}


def checked(make: Make) -> None:
    """Each task is of this set, says something and has checks; its limits leave room for an answer."""
    made = make()
    for task in tasks(made, "train"):
        assert task.set == made.name
        assert task.messages
        assert task.checks
        assert 0 < task.limits.turn_tokens <= task.limits.max_tokens


def demonstrations(make: Make) -> None:
    """Scripts repeat, use the task's tools, and say what each call is answered."""
    one, two = make(), make()
    for task in tasks(one, "train"):
        for number in range(3):
            script = one.demonstrate(task, number)
            assert script == two.demonstrate(task, number)
            if script is not None:
                assert all(call.name in task.tools for call in script.calls)
                assert len(script.observations) == len(script.calls) < task.limits.max_turns


def pieces(make: Make) -> None:
    """Pieces are not empty, and named once."""
    named = make().pieces()
    assert all(named)
    assert len(set(named)) == len(named)
    assert named == make().pieces()


CHECKS = (repeats, storable, disjoint, checked, demonstrations, pieces)
