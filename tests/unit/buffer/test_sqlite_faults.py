"""What can go wrong with the file of a store ends in one line that says what to do, and changes nothing."""

import multiprocessing
import resource
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from opened import until_end

from rollwright.buffer.base import Drop
from rollwright.buffer.config import QueueConfig
from rollwright.buffer.memory import MemoryStore
from rollwright.buffer.schema import VERSION
from rollwright.buffer.sqlite import SqliteStore
from rollwright.errors import SchemaError, StoreError
from rollwright.testing.clock import FakeClock
from rollwright.testing.records import make_group
from rollwright.testing.stores import consume, rollouts, started, tally
from rollwright.types import Disposition


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files of this process cannot grow past `size` bytes (Python ignores SIGXFSZ, so a write fails)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


def open_store(path: Path, **more: object) -> SqliteStore:
    return until_end(SqliteStore(path, 10_000, FakeClock(), **more))  # type: ignore[arg-type]


def test_disk_full(path: Path) -> None:
    store = open_store(path)
    kept, number = 0, 0
    with full_disk(3 * 2**20), pytest.raises(StoreError, match="free space") as caught:
        for number in range(10_000):
            group = make_group([1.0, 0.0], id=f"g{number}", pattern="PS" * 500)
            store.start([member.rollout.identity for member in group.members])
            assert store.put(group)
            kept += 1
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert kept >= 5
    for reader in (store, open_store(path)):  # the same connection, and one that comes later
        by = tally(reader)
        assert by["queued"] == 2 * kept and by.get("running", 0) in (0, 2)
        assert [q.position for q in reader.read(0, 10_000)] == list(range(1, kept + 1))
    group = started(store, 10_001)
    assert store.put(group) and store.depth() == kept + 1


def test_commit_on_a_full_disk_is_none(path: Path) -> None:
    store = open_store(path)
    groups = [started(store, i, size=64) for i in range(40)]
    assert all(store.put(group) for group in groups)
    commit = consume(store, *groups, position=40)
    with full_disk(2**16), pytest.raises(StoreError, match="free space"):
        store.commit(commit)
    assert store.last_commit() is None and store.depth() == 40 and tally(store) == {"queued": 40 * 64}
    store.commit(commit)
    assert tally(store) == {"trained": 40 * 64}


class Interrupting(FakeClock):
    """A clock in whose `wall` Ctrl-C arrives, after it was asked `calls` times."""

    calls = 10**9

    def wall(self) -> float:
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        return super().wall()


def test_an_interrupted_commit_is_none(path: Path) -> None:
    clock = Interrupting()
    store = until_end(SqliteStore(path, 4, clock))
    group = started(store, 0)
    assert store.put(group)
    stale = Drop(rollout="g0/1", disposition=Disposition.STALE)
    commit = replace(consume(store, group, position=1, dropped=[stale]), trained=("g0/0",))
    clock.calls = 1  # the second one is asked for after the trained rollouts were written
    with pytest.raises(KeyboardInterrupt):
        store.commit(commit)
    clock.calls = 10**9
    assert tally(store) == {"queued": 2} and store.last_commit() is None
    store.commit(commit)
    assert tally(store) == {"trained": 1, "stale": 1}


def test_consumed_payloads_make_room(path: Path) -> None:
    store = open_store(path)
    for step in range(1, 30):
        group = make_group([1.0, 0.0], id=f"g{step}", pattern="PS" * 2000)
        store.start([member.rollout.identity for member in group.members])
        assert store.put(group)
        store.commit(consume(store, group, position=step, step=step))
    store.close()
    assert path.stat().st_size < 2**20  # 29 groups of 0.9 MB went through
    assert [entry.name for entry in path.parent.iterdir()] == ["run.db"]


def test_another_schema_is_refused(path: Path) -> None:
    open_store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE meta SET version = ?", (VERSION + 1,))
    with pytest.raises(SchemaError, match=f"schema {VERSION + 1}"):
        open_store(path)


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_a_file_that_is_no_store_is_refused_and_kept(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises((SchemaError, StoreError)):
        open_store(path)
    assert path.read_bytes() == content


def test_damage_is_reported(path: Path) -> None:
    store = open_store(path)
    for number in range(20):
        assert store.put(started(store, number))
    store.close()
    data = bytearray(path.read_bytes())
    for page in range(8192, len(data), 8192):
        data[page : page + 4096] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        open_store(path).read(0, 99)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        open_store(tmp_path / "nowhere" / "run.db")


def test_another_run_is_refused(path: Path) -> None:
    open_store(path, run="a-1").close()
    with pytest.raises(StoreError, match="belongs to run a-1"):
        open_store(path, run="b-1")
    store = open_store(path)  # a viewer takes what is there
    assert store.lineage().run == "a-1"


def test_a_hanging_writer_is_reported(path: Path) -> None:
    store = open_store(path, busy_seconds=0.05)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="held by another process"):
        started(store, 0)
    assert store.counts().started == 0  # readers do not wait for it
    blocker.execute("ROLLBACK")
    started(store, 0)
    assert tally(store) == {"running": 2}
    blocker.close()


def test_what_survives_closing(path: Path) -> None:
    store = open_store(path)
    a, b = started(store, 0), started(store, 1)
    assert store.put(a) and store.put(b)
    store.commit(consume(store, a, position=1))
    commit, lineage = store.last_commit(), store.fork(1)
    store.close()
    again = open_store(path)
    assert commit is not None and again.last_commit() == commit
    assert again.lineage() == lineage and tally(again) == {"trained": 2, "queued": 2}
    assert [rollouts(q.group) for q in again.read(0, 9)] == [rollouts(b)]


def test_threads_take_turns(path: Path) -> None:
    store = open_store(path)
    errors: list[Exception] = []

    def work(thread: int) -> None:
        try:
            for number in range(10):
                assert store.put(started(store, 100 * thread + number))
                assert store.counts().balanced
        except (StoreError, AssertionError, sqlite3.Error) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and store.depth() == 40 and tally(store) == {"queued": 80}


def _use(store: SqliteStore, results: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        store.counts()
        results.put("no error")
    except StoreError as error:
        results.put(str(error))


def test_a_store_is_not_carried_through_a_fork(path: Path) -> None:
    store = open_store(path)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_use, args=(store, results))
    process.start()
    assert "before a fork" in results.get()
    process.join()


def test_two_who_create_at_once_get_one_store(path: Path) -> None:
    barrier, stores = threading.Barrier(4), []

    def create() -> None:
        barrier.wait()
        stores.append(open_store(path))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 4
    started(stores[0], 0)
    assert all(tally(store) == {"running": 2} for store in stores)


@pytest.mark.parametrize(("kind", "made"), [("memory", MemoryStore), ("sqlite", SqliteStore)])
def test_config_chooses(path: Path, kind: str, made: type) -> None:
    config = QueueConfig.model_validate({"type": kind, "capacity": 3})
    store = config.build(path, FakeClock(), run="run")
    assert isinstance(store, made)
    store.close()
