"""The processes that `test_store_processes` starts and kills: a rollout process, a trainer, a viewer.

Each is a fresh interpreter: `python store_hammer.py ROLE FOLDER SECONDS SEED`. The trainer keeps what it
"learned" in a checkpoint, which names every rollout whose gradient is in it: that is what must hold each
rollout exactly once.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from rollwright.blobs.folder import FolderBlobs
from rollwright.buffer.base import Commit, Drop
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.testing.records import make_group
from rollwright.testing.stores import rollouts
from rollwright.types import Disposition

CAPACITY = 8


def produce(store: SqliteStore, folder: Path, seconds: float, rng: random.Random) -> None:
    """Start, put (sometimes twice), give up some; after a crash the first thing is to void what was
    running."""
    store.reopen()
    end, life = time.monotonic() + seconds, os.getpid()
    number = 0
    while time.monotonic() < end:
        number += 1
        group = make_group([1.0, 0.0, 1.0, 0.0], id=f"{life}-{number}")
        store.start([member.rollout.identity for member in group.members])
        if rng.random() < 0.1:
            store.drop([Drop(rollout=r, disposition=Disposition.VOID) for r in rollouts(group)[:2]])
        while not store.put(group):
            time.sleep(0.002)
            if time.monotonic() > end:
                return
        if rng.random() < 0.2:
            assert store.put(group)


def consume(store: SqliteStore, folder: Path, seconds: float, rng: random.Random) -> None:
    """Resume from the last commit, then train: read, learn, checkpoint, commit."""
    blobs = FolderBlobs(folder / "blobs")
    last = store.last_commit()
    learned = json.loads(blobs.get(last.checkpoint)) if last else []
    position, step = (last.position, last.version.step) if last else (0, 0)
    lineage = store.fork(step) if last else store.lineage()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        groups = store.read(position, 3)
        if not groups:
            time.sleep(0.002)
            continue
        assert [q.position for q in groups] == list(range(position + 1, position + 1 + len(groups)))
        trained, dropped = [], []
        for queued in groups:
            (dropped if rng.random() < 0.2 else trained).extend(rollouts(queued.group))
        learned += trained
        position, step = groups[-1].position, step + 1
        checkpoint = blobs.put(json.dumps(learned).encode())
        store.commit(
            Commit(
                version=lineage.version(step),
                position=position,
                trained=tuple(trained),
                dropped=tuple(Drop(rollout=r, disposition=Disposition.STALE) for r in dropped),
                checkpoint=checkpoint,
            )
        )
        if step % 5 == 0:
            blobs.keep(frozenset({checkpoint}))


def view(store: SqliteStore, folder: Path, seconds: float, rng: random.Random) -> None:
    """At every moment the books balance and the queue is bounded."""
    end, polls = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        counts = store.counts()
        assert counts.balanced, counts
        assert store.depth() <= CAPACITY
        polls += 1
        time.sleep(0.001)
    assert polls > 10


def main(role: str, folder: Path, seconds: float, seed: int) -> None:
    work = {"produce": produce, "consume": consume, "view": view}[role]
    store = SqliteStore(folder / "run.db", CAPACITY, SystemClock())
    work(store, folder, seconds, random.Random(seed))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
