"""What every queue-and-ledger store must do, as checks over a `make` callable.

Role: the conformance suite of `buffer.base.Store`. Neighbours: `tests/contract` runs it over our stores, a
plug-in's tests over theirs. Invariant: a check makes its own stores, and asserts after each step that the
ledger balances.

Use: `@pytest.mark.parametrize("check", CHECKS)`, then `check(make)`; `make(capacity)` gives an empty store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rollwright.buffer.base import Commit, Drop, Store
from rollwright.errors import StoreError
from rollwright.testing.records import make_group
from rollwright.types import Disposition, Group, PolicyVersion

Make = Callable[[int], Store]


def rollouts(group: Group) -> tuple[str, ...]:
    """Ids of a group's members."""
    return tuple(member.rollout.identity.rollout for member in group.members)


def started(store: Store, number: int, *, size: int = 2, attempt: int = 0) -> Group:
    """Group `number` with its rollouts written down as running."""
    group = make_group([1.0, 0.0] * (size // 2), id=f"g{number}", attempt=attempt)
    store.start([member.rollout.identity for member in group.members])
    return group


def consume(
    store: Store, *groups: Group, position: int, step: int = 1, dropped: Sequence[Drop] = ()
) -> Commit:
    """A commit by the newest incarnation that trains `groups`; not carried out yet."""
    return Commit(
        version=store.lineage().version(step),
        position=position,
        trained=tuple(r for group in groups for r in rollouts(group)),
        dropped=tuple(dropped),
        checkpoint=f"{step:064x}",
    )


def refused(action: Callable[[], object], store: Store) -> str:
    """The text of the `StoreError` that `action` must raise, having changed nothing."""
    before = (store.counts(), store.depth(), store.last_commit(), store.read(0, 99), store.lineage())
    try:
        action()
    except StoreError as error:
        after = (store.counts(), store.depth(), store.last_commit(), store.read(0, 99), store.lineage())
        assert before[:3] == after[:3] and before[4] == after[4]
        assert [q.position for q in before[3]] == [q.position for q in after[3]]
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("expected a StoreError")


def tally(store: Store) -> dict[str, int]:
    """The dispositions, after checking that they add up to what was started."""
    counts = store.counts()
    assert counts.balanced, counts
    return counts.by


def check_life_of_a_group(make: Make) -> None:
    """running → queued → trained, each with its books balanced; what is read is what was put."""
    store = make(4)
    group = started(store, 0)
    assert tally(store) == {"running": 2}
    assert store.put(group)
    assert tally(store) == {"queued": 2} and store.depth() == 1
    (queued,) = store.read(0, 10)
    assert queued.position == 1 and rollouts(queued.group) == rollouts(group)
    put, read = group.members[0].rollout.rows[0], queued.group.members[0].rollout.rows[0]
    assert put.tokens.tobytes() == read.tokens.tobytes() and put.logprobs.tobytes() == read.logprobs.tobytes()
    assert store.read(1, 10) == []
    commit = consume(store, group, position=1)
    store.commit(commit)
    assert tally(store) == {"trained": 2} and store.depth() == 0 and store.read(0, 10) == []
    assert store.last_commit() == commit
    entry = store.find("g0/0")
    assert entry is not None and entry.identity == group.members[0].rollout.identity
    assert (entry.disposition, entry.version, entry.uses) == (Disposition.TRAINED, str(commit.version), 1)
    assert store.find("nobody") is None
    store.close()
    store.close()


def check_order_and_limit(make: Make) -> None:
    """Reading is in order, in pages, and consumes nothing; positions go on after a commit."""
    store = make(5)
    groups = [started(store, i) for i in range(5)]
    assert all(store.put(group) for group in groups)
    assert [q.position for q in store.read(0, 2)] == [1, 2]
    assert [q.position for q in store.read(2, 99)] == [3, 4, 5]
    assert [q.group.id for q in store.read(0, 99)] == ["g0", "g1", "g2", "g3", "g4"]
    store.commit(consume(store, *groups, position=5))
    assert store.put(started(store, 5))
    assert [q.position for q in store.read(0, 99)] == [6]


def check_back_pressure(make: Make) -> None:
    """A full queue says False and changes nothing; it takes again once the trainer has committed."""
    store = make(2)
    groups = [started(store, i) for i in range(3)]
    assert store.put(groups[0]) and store.put(groups[1])
    assert not store.put(groups[2]) and not store.put(groups[2])
    assert store.depth() == 2 and tally(store) == {"queued": 4, "running": 2}
    assert store.put(groups[0])  # a repeat needs no room
    store.commit(consume(store, groups[0], position=1))
    assert store.put(groups[2])
    assert [q.position for q in store.read(1, 99)] == [2, 3]


def check_repeated_put(make: Make) -> None:
    """The same (id, attempt) again is accepted and changes nothing, before and after it was consumed."""
    store = make(4)
    group = started(store, 0)
    assert store.put(group) and store.put(group)
    assert store.depth() == 1 and tally(store) == {"queued": 2}
    store.commit(consume(store, group, position=1))
    assert store.put(group)
    assert store.depth() == 0 and tally(store) == {"trained": 2} and store.late() == ()


def check_second_attempt(make: Make) -> None:
    """Another attempt of a group that was queued is not queued; its rollouts end as duplicates."""
    store = make(4)
    assert store.put(started(store, 0))
    assert store.put(started(store, 0, attempt=1))
    assert store.depth() == 1 and tally(store) == {"queued": 2, "duplicate": 2}
    assert {drop.disposition for drop in store.late()} == {Disposition.DUPLICATE}
    third = make_group([1.0, 0.0], id="g0")  # a factory that counts anew after a crash: new rollouts, old key
    members = tuple(
        replace(
            m,
            rollout=replace(
                m.rollout, identity=replace(m.rollout.identity, rollout=f"again/{m.rollout.identity.rollout}")
            ),
        )
        for m in third.members
    )
    store.start([m.rollout.identity for m in members])
    assert store.put(replace(third, members=members))
    assert store.depth() == 1 and tally(store) == {"queued": 2, "duplicate": 4}


def check_late_group(make: Make) -> None:
    """A group whose rollouts were given up is dropped when it comes; those still running end as late."""
    store = make(4)
    group = started(store, 0, size=4)
    store.drop([Drop(rollout="g0/1", disposition=Disposition.VOID, reason="deadline")])
    assert store.put(group) and store.put(group)
    assert store.depth() == 0 and tally(store) == {"void": 1, "late": 3}
    entry = store.find("g0/1")
    assert entry is not None and (entry.disposition, entry.reason) == (Disposition.VOID, "deadline")
    assert [drop.rollout for drop in store.late()] == ["g0/0", "g0/2", "g0/3"]


def check_unknown_and_repeated_rollouts(make: Make) -> None:
    """A rollout nobody started is refused everywhere, and none can be started twice."""
    store = make(4)
    stranger = make_group([1.0, 0.0], id="stranger")
    assert "start" in refused(lambda: store.put(stranger), store)
    drop = Drop(rollout="stranger/0", disposition=Disposition.VOID)
    refused(lambda: store.drop([drop]), store)
    known = started(store, 0)
    refused(lambda: store.start([known.members[0].rollout.identity]), store)
    fresh = stranger.members[0].rollout.identity
    refused(lambda: store.start([fresh, known.members[0].rollout.identity]), store)
    refused(lambda: store.start([fresh, fresh]), store)
    assert store.find(fresh.rollout) is None
    refused(lambda: store.put(make_group([], id="empty")), store)
    assert store.put(known)
    refused(lambda: store.put(replace(known, id="other")), store)


def check_drops(make: Make) -> None:
    """A drop ends an open rollout with its reason; a second one is only logged; open is no end."""
    store = make(4)
    started(store, 0)
    first = Drop(rollout="g0/0", disposition=Disposition.SURPLUS, reason="enough")
    second = Drop(rollout="g0/0", disposition=Disposition.VOID, reason="again")
    other = Drop(rollout="g0/1", disposition=Disposition.EVALUATED)
    store.drop([first, second, other])
    store.drop([second])
    assert tally(store) == {"surplus": 1, "evaluated": 1}
    entry = store.find("g0/0")
    assert entry is not None and (entry.disposition, entry.reason, entry.uses) == (
        first.disposition,
        "enough",
        0,
    )
    assert store.late() == (second, second)
    started(store, 1)
    for disposition in (Disposition.RUNNING, Disposition.QUEUED, Disposition.TRAINED):
        wrong = Drop(rollout="g1/0", disposition=disposition)
        refused(lambda wrong=wrong: store.drop([wrong]), store)  # type: ignore[misc]


def check_commit_is_all_or_nothing(make: Make) -> None:
    """A commit that would lose a rollout, train one twice or turn time back changes nothing."""
    store = make(8)
    a, b = started(store, 0), started(store, 1)
    running = started(store, 2)
    assert store.put(a) and store.put(b)
    good = consume(store, a, position=1)
    refused(lambda: store.commit(replace(good, trained=("g0/0",))), store)  # g0/1 would be lost
    refused(lambda: store.commit(replace(good, trained=("g0/0", "g0/0", "g0/1"))), store)
    refused(lambda: store.commit(consume(store, a, b, position=1)), store)  # g1 would be read again
    refused(lambda: store.commit(consume(store, a, running, position=1)), store)
    refused(lambda: store.commit(consume(store, a, b, position=3)), store)  # nothing is there yet
    refused(lambda: store.commit(replace(good, trained=("g0/0", "g0/1", "nobody"))), store)
    refused(lambda: store.commit(replace(good, checkpoint="")), store)
    both = Drop(rollout="g0/0", disposition=Disposition.STALE)
    refused(lambda: store.commit(replace(good, dropped=(both,))), store)
    wrong = Drop(rollout="g0/1", disposition=Disposition.TRAINED)
    refused(lambda: store.commit(replace(good, trained=("g0/0",), dropped=(wrong,))), store)
    assert tally(store) == {"queued": 4, "running": 2} and store.last_commit() is None
    store.commit(replace(good, trained=("g0/0",), dropped=(replace(wrong, disposition=Disposition.STALE),)))
    assert tally(store) == {"trained": 1, "stale": 1, "queued": 2, "running": 2}
    refused(lambda: store.commit(consume(store, a, position=1, step=2)), store)  # trained twice
    refused(lambda: store.commit(consume(store, b, position=2, step=0)), store)  # version runs back
    refused(lambda: store.commit(consume(store, position=0, step=2)), store)  # position runs back
    store.commit(consume(store, b, position=2, step=2))
    assert tally(store) == {"trained": 3, "stale": 1, "running": 2}


def check_commit_without_training(make: Make) -> None:
    """Groups may be consumed by dropping them; the checkpoint to resume from stays the last one."""
    store = make(4)
    a, b = started(store, 0), started(store, 1)
    assert store.put(a) and store.put(b)
    store.commit(consume(store, a, position=1))
    drops = [Drop(rollout=r, disposition=Disposition.NO_SIGNAL) for r in rollouts(b)]
    store.commit(replace(consume(store, position=2, dropped=drops), checkpoint=""))
    last = store.last_commit()
    assert last is not None and (last.position, last.checkpoint) == (2, f"{1:064x}")
    assert tally(store) == {"trained": 2, "no_signal": 2} and store.depth() == 0


def check_entries(make: Make) -> None:
    """All lines at once, in the order of the starts, and each the same as alone."""
    store = make(4)
    assert store.entries() == []
    b, a = started(store, 1), started(store, 0)
    assert store.put(a)
    store.drop([Drop(rollout=rollouts(b)[0], disposition=Disposition.VOID, reason="lost")])
    store.commit(consume(store, a, position=1))
    entries = store.entries()
    assert [entry.identity.rollout for entry in entries] == [*rollouts(b), *rollouts(a)]
    assert entries == [store.find(entry.identity.rollout) for entry in entries]
    assert [entry.disposition.value for entry in entries] == ["void", "running", "trained", "trained"]


def check_history(make: Make) -> None:
    """The newest started rollouts come first; every commit is kept, in order."""
    store = make(4)
    assert store.newest(5) == [] and store.commits() == []
    a, b = started(store, 0), started(store, 1)
    assert [identity.rollout for identity in store.newest(3)] == [*reversed(rollouts(b)), rollouts(a)[1]]
    assert store.put(a) and store.put(b)
    made = [consume(store, a, position=1, step=1), consume(store, b, position=2, step=2)]
    for commit in made:
        store.commit(commit)
    assert store.commits() == made


def check_reopen(make: Make) -> None:
    """After a crash what was running is void; what was queued waits on."""
    store = make(4)
    queued, running = started(store, 0), started(store, 1)
    assert store.put(queued)
    assert store.reopen() == 2 and store.reopen() == 0
    assert tally(store) == {"queued": 2, "void": 2}
    assert store.put(running) and store.depth() == 1  # it comes too late
    store.commit(consume(store, queued, position=1))
    assert tally(store) == {"trained": 2, "void": 2}


def check_lineage(make: Make) -> None:
    """Forks are kept in order; only the newest incarnation may commit."""
    store = make(4)
    assert store.lineage().forks == (0,)
    a, b = started(store, 0), started(store, 1)
    assert store.put(a) and store.put(b)
    store.commit(consume(store, a, position=1, step=3))
    zombie = consume(store, b, position=2, step=4)
    refused(lambda: store.fork(4), store)
    refused(lambda: store.fork(-1), store)
    lineage = store.fork(3)
    assert lineage == store.lineage() and lineage.forks == (0, 3)
    assert lineage.version(4) == PolicyVersion(run=lineage.run, incarnation=1, step=4)
    assert "replaced" in refused(lambda: store.commit(zombie), store)
    store.commit(consume(store, b, position=2, step=4))
    assert store.fork(2).forks == (0, 3, 2)


CHECKS: tuple[Callable[[Make], None], ...] = (
    check_life_of_a_group,
    check_order_and_limit,
    check_back_pressure,
    check_repeated_put,
    check_second_attempt,
    check_late_group,
    check_unknown_and_repeated_rollouts,
    check_drops,
    check_commit_is_all_or_nothing,
    check_commit_without_training,
    check_entries,
    check_history,
    check_reopen,
    check_lineage,
)
