"""One store, several processes, and kill −9: nothing is lost, nothing is trained twice."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rollwright.blobs.folder import FolderBlobs
from rollwright.buffer.sqlite import SqliteStore
from rollwright.clock import SystemClock
from rollwright.types import Disposition

HAMMER = Path(__file__).with_name("store_hammer.py")
CAPACITY = 8


def start(role: str, folder: Path, seconds: float, seed: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HAMMER), role, str(folder), str(seconds), str(seed)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def finished(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()


def check_books(folder: Path) -> Counter[str]:
    """What the last checkpoint holds is what the ledger calls trained, each rollout once; every rollout has
    its line."""
    store = SqliteStore(folder / "run.db", CAPACITY, SystemClock())
    store.reopen()
    counts, last = store.counts(), store.last_commit()
    assert counts.balanced and last is not None
    learned = json.loads(FolderBlobs(folder / "blobs").get(last.checkpoint))
    assert len(learned) == len(set(learned)), "trained twice"
    assert counts.by["trained"] == len(learned)
    for rollout in random.Random(0).sample(learned, min(50, len(learned))):
        entry = store.find(rollout)
        assert entry is not None and entry.disposition is Disposition.TRAINED
    waiting = store.read(last.position, 10_000)
    assert counts.by.get("queued", 0) == sum(len(queued.group.members) for queued in waiting), "lost"
    assert [q.position for q in waiting] == list(range(last.position + 1, last.position + 1 + len(waiting)))
    assert "running" not in counts.by
    store.close()
    return Counter(counts.by)


def test_three_processes_at_once(tmp_path: Path) -> None:
    processes = [start(role, tmp_path, 3.0) for role in ("produce", "consume", "view")]
    for process in processes:
        finished(process)
    by = check_books(tmp_path)
    assert by["trained"] > 50 and by["stale"] and by["late"] and by["void"]


def test_kill_and_resume(tmp_path: Path) -> None:
    rng = random.Random(1)
    roles = ["produce", "consume"]
    running = {role: start(role, tmp_path, 60.0, seed=n) for n, role in enumerate(roles)}
    viewer = start("view", tmp_path, 6.0)
    kills = 0
    while viewer.poll() is None:
        time.sleep(rng.uniform(0.4, 1.0))
        role = rng.choice(roles)
        assert running[role].poll() is None, running[role].communicate()[1].decode()
        running[role].kill()
        running[role].communicate()
        kills += 1
        running[role] = start(role, tmp_path, 60.0, seed=kills)
    for process in running.values():
        process.kill()
        process.communicate()
    finished(viewer)
    assert kills >= 3
    by = check_books(tmp_path)
    assert by["trained"] > 20
    finished(start("consume", tmp_path, 1.0))  # it goes on where it was
    assert check_books(tmp_path)["trained"] >= by["trained"]
