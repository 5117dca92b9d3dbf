"""Random lives of a ledger: both stores agree with each other and with a model, and balance after every
step."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from rollwright.buffer.base import Commit, Drop, Store
from rollwright.buffer.memory import MemoryStore
from rollwright.buffer.sqlite import SqliteStore
from rollwright.errors import StoreError
from rollwright.testing.clock import FakeClock
from rollwright.testing.records import make_group
from rollwright.testing.stores import rollouts
from rollwright.types import Disposition, Group

CAPACITY = 3
ENDS = [Disposition.VOID, Disposition.STALE, Disposition.SURPLUS, Disposition.EVALUATED]

SPOILS = ["", "", "", "forget", "twice", "ahead", "no checkpoint"]
"""What is wrong with a commit."""


class StoreMachine(RuleBasedStateMachine):
    """What the trainer has read is kept here as a real one would; the stores may never contradict it."""

    groups = Bundle("groups")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores: list[Store] = [MemoryStore(CAPACITY), self.open()]
        self.number = 0
        self.step = 0
        self.consumed = 0
        self.read_positions: list[int] = []
        self.ended: dict[str, Disposition] = {}

    def open(self) -> Store:
        return SqliteStore(self.folder / "run.db", CAPACITY, FakeClock(), busy_seconds=1.0)

    def both(self, action: str, *arguments: object) -> object:
        """The one answer (or refusal) of both stores."""
        answers: list[object] = []
        for store in self.stores:
            try:
                answers.append(getattr(store, action)(*arguments))
            except StoreError as error:
                answers.append(str(error))
        assert answers[0] == answers[1]
        return answers[0]

    @rule(target=groups, size=st.integers(1, 3), attempt=st.integers(0, 1), fresh=st.booleans())
    def start(self, size: int, attempt: int, fresh: bool) -> Group:
        self.number += fresh
        group = make_group([1.0] * size, id=f"g{self.number}", attempt=attempt)
        self.both("start", [member.rollout.identity for member in group.members])  # refused where known
        return group

    @rule(group=groups)
    def put(self, group: Group) -> None:
        self.both("put", group)

    @rule(group=groups, end=st.sampled_from(ENDS), count=st.integers(1, 3))
    def drop_running(self, group: Group, end: Disposition, count: int) -> None:
        waiting = {r for queued in self.stores[0].read(0, 99) for r in rollouts(queued.group)}
        chosen = [r for r in rollouts(group)[:count] if r not in waiting]
        self.both("drop", [Drop(rollout=r, disposition=end, reason="test") for r in chosen])

    @rule(limit=st.integers(1, 4))
    def read_on(self, limit: int) -> None:
        after = self.read_positions[-1] if self.read_positions else 0
        found = [store.read(after, limit) for store in self.stores]
        positions = [[queued.position for queued in each] for each in found]
        assert positions[0] == positions[1] and positions[0] == sorted(positions[0])
        self.read_positions += positions[0]

    @rule(count=st.integers(0, 4), spoil=st.sampled_from(SPOILS))
    def commit(self, count: int, spoil: str) -> None:
        waiting = self.stores[0].read(self.consumed, 99)
        behind = [q for q in waiting if q.position in self.read_positions][:count]
        names = [r for queued in behind for r in rollouts(queued.group)]
        position = behind[-1].position if behind else self.consumed
        trained, dropped = names[::2], [Drop(rollout=r, disposition=Disposition.STALE) for r in names[1::2]]
        match spoil:
            case "forget":
                trained = trained[1:]
            case "twice":
                trained = trained + [r for r, end in self.ended.items() if end is Disposition.TRAINED][:1]
            case "ahead":
                position += 1
        checkpoint = "" if spoil == "no checkpoint" else f"{self.step + 1:064x}"
        commit = Commit(
            version=self.stores[0].lineage().version(self.step + 1),
            position=position,
            trained=tuple(trained),
            dropped=tuple(dropped),
            checkpoint=checkpoint,
        )
        refused = self.both("commit", commit)
        if spoil == "" or (spoil == "forget" and not names):
            assert refused is None, refused
        if refused is None:
            assert checkpoint or not trained
            self.step += 1
            self.consumed = position

    @precondition(lambda self: self.step > 0)
    @rule(back=st.integers(0, 2))
    def crash_and_resume(self, back: int) -> None:
        self.stores[1].close()
        self.stores[1] = self.open()
        self.both("reopen")
        last = self.stores[0].last_commit()
        assert last is not None and last.position == self.consumed
        self.both("fork", max(0, last.version.step - back))
        self.step = max(0, last.version.step - back)
        self.read_positions = [p for p in self.read_positions if p <= self.consumed]

    @invariant()
    def balanced_and_equal(self) -> None:
        counts = [store.counts() for store in self.stores]
        assert counts[0].balanced and counts[1].balanced and counts[0] == counts[1]

    @invariant()
    def bounded(self) -> None:
        depths = [store.depth() for store in self.stores]
        assert depths[0] == depths[1] <= CAPACITY

    @invariant()
    def each_position_once(self) -> None:
        assert self.read_positions == sorted(set(self.read_positions))

    @invariant()
    def nothing_queued_behind_the_commit(self) -> None:
        waiting = sum(len(q.group.members) for q in self.stores[0].read(0, 99))
        assert self.stores[0].counts().by.get("queued", 0) == waiting
        assert all(q.position > self.consumed for q in self.stores[1].read(0, 99))

    @invariant()
    def what_ended_stays_ended(self) -> None:
        for rollout, end in self.ended.items():
            for store in self.stores:
                entry = store.find(rollout)
                assert entry is not None and entry.disposition is end
        for number in range(self.number + 1):
            for member in (f"g{number}/{i}{tail}" for i in range(3) for tail in ("", ".1")):
                entry = self.stores[1].find(member) if member not in self.ended else None
                if entry is not None and not entry.disposition.open:
                    self.ended[member] = entry.disposition

    @invariant()
    def same_late_log(self) -> None:
        assert self.stores[0].late() == self.stores[1].late()

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStoreMachine = StoreMachine.TestCase
