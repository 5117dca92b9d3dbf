"""The registry of owners, and the reaper over real processes, cgroups, mounts and folders."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.clock import SystemClock
from rollwright.errors import SandboxError, SandboxUnavailable
from rollwright.sandbox import owners, processes, registry, remains
from rollwright.sandbox.owners import Reaped, Registry, reap_all

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
CGROUPS = [
    folder
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/unified"))
    if (folder / "cgroup.procs").is_file() and os.access(folder, os.W_OK)
]
HOST = """
import os, subprocess, sys
from pathlib import Path
from rollwright.sandbox.owners import Registry, record
folder, root, cgroup = map(Path, sys.argv[1:])
entry = Registry(folder).enter(backend="native", root=root, label="a run")
root.mkdir(parents=True)
code = "import os, time; os.fork() and os.fork() and os.write(1, b'x'); time.sleep(600)"
command = [sys.executable, "-I", "-S", "-c", code]
quiet = subprocess.DEVNULL
helper = subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=subprocess.PIPE)
helper.stdout.read(1)
entry.add_process(helper.pid)
if cgroup.is_absolute():
    entry.add_cgroup(cgroup)
    (cgroup / "below").mkdir(parents=True)
    member = subprocess.Popen(["sleep", "600"], stdin=quiet, stdout=quiet)
    (cgroup / "below" / "cgroup.procs").write_text(str(member.pid))
entry.sandbox("first", "r1"); (root / "first" / "a" / "b").mkdir(parents=True)
(root / "first" / "file").write_text("x")
entry.sandbox("second", "r2")
entry.sandbox("../../precious", "r3")
entry.add_folder(root.parent / "template"); (root.parent / "template").mkdir()
(root / "worker-folder").mkdir(); record(root / "worker-folder", "r4", 0.0)
(root / "kept").mkdir(); (root / "kept" / "note").write_text("not recorded")
sys.stdout.write(f"{helper.pid}\\n"); sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "registry"


@contextlib.contextmanager
def killed_owner(folder: Path, root: Path, cgroup: Path = Path(".")) -> Iterator[int]:
    """A host that was killed while it owned things; the leader of the session it left."""
    command = [sys.executable, "-c", HOST, str(folder), str(root), str(cgroup)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdin is not None and host.stdout is not None
    helper = int(host.stdout.readline())
    host.kill()
    host.communicate(timeout=20)
    try:
        yield helper
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(helper, signal.SIGKILL)


def session(leader: int) -> list[int]:
    return [pid for pid, of, _ in processes.every() if of == leader]


def dead(folder: Path, entry: owners.Entry, **changes: object) -> None:
    """As if that entry's host had gone, or changed in other ways."""
    path = folder / f"{entry.id}.jsonl"
    head, _, rest = path.read_bytes().partition(b"\n")
    changes = changes or {"host_started": 1}
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(head), **changes}) + b"\n" + rest)


def test_what_a_killed_owner_left_is_removed_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    precious, root = tmp_path / "precious", tmp_path / "made" / "sandboxes"
    precious.mkdir()
    with killed_owner(folder, root) as helper:
        assert len(session(helper)) == 3
        reaped = reap_all(folder)
        assert session(helper) == []
    assert reaped == Reaped(processes=3, folders=3, owners=("a run",))
    assert [path.name for path in root.iterdir()] == ["kept"] and (root / "kept" / "note").is_file()
    assert not (root.parent / "template").exists() and precious.is_dir()
    assert not folder.exists()
    assert not reap_all(folder)


@pytest.mark.skipif(not CGROUPS, reason="cgroups cannot be written here")
@pytest.mark.parametrize("parent", CGROUPS, ids=lambda path: path.name)
def test_its_cgroups_go_with_all_in_them(tmp_path: Path, folder: Path, parent: Path) -> None:
    cgroup = parent / f"rollwright-test-{os.getpid()}"
    with killed_owner(folder, tmp_path / "root", cgroup):
        members = {int(line) for line in (cgroup / "below" / "cgroup.procs").read_text().split()}
        assert len(members) == 1
        reaped = reap_all(folder)
        assert reaped.cgroups == 2 and not cgroup.exists()
        assert not any(map(processes.alive, members))


@pytest.mark.skipif(not CGROUPS, reason="cgroups cannot be written here")
def test_a_fork_bomb_in_a_cgroup_ends_and_a_cgroup_of_ours_stays(tmp_path: Path) -> None:
    cgroup = CGROUPS[-1 if CGROUPS[-1].name == "pids" else 0] / f"rollwright-bomb-{os.getpid()}"
    cgroup.mkdir()
    if (cgroup / "pids.max").exists():
        (cgroup / "pids.max").write_text("60")
    code = f"import os\nopen('{cgroup}/cgroup.procs', 'w').write(str(os.getpid()))\n" + (
        "n = 0\nwhile n < 2000:\n    n += 1\n    try: os.fork()\n    except OSError: pass\n"
    )
    bomb = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=True)
    try:
        while len((cgroup / "cgroup.procs").read_text().split()) < 20:
            assert bomb.poll() is None
        assert remains.remove_cgroup(cgroup, SystemClock()) == 1
        assert not cgroup.exists()
    finally:
        bomb.kill()
        bomb.wait()
    assert session(bomb.pid) == []
    assert remains.remove_cgroup(tmp_path, SystemClock()) == 0 and tmp_path.is_dir(), "no cgroup at all"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_mounts_below_go_first_and_nothing_is_deleted_through_one(tmp_path: Path, folder: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "a root"
    outside.mkdir()
    (outside / "file").write_text("x")
    code = (
        "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "os.unshare = libc.unshare(0x20000)\nassert libc.mount(b'none', b'/', None, 0x44000, None) == 0\n"
        "from pathlib import Path\nfrom rollwright.sandbox import owners, remains\n"
        "outside, root, folder = map(Path, sys.argv[1:])\n"
        "entry = owners.Registry(folder).enter(backend='native', root=root)\n"
        "entry.sandbox('one', 'r')\nwork = root / 'one' / 'work'\nwork.mkdir(parents=True)\n"
        "assert libc.mount(os.fsencode(outside), os.fsencode(work), None, 0x1000, None) == 0\n"
        "assert libc.mount(b'tmpfs', os.fsencode(work), b'tmpfs', 0, None) == 0\n"
        "assert not remains.remove_folder(root / 'one'), 'there is a mount in it'\n"
        "path = folder / f'{entry.id}.jsonl'\n"
        "path.write_text(path.read_text().replace('\"host_started\":', '\"host_started\":1'))\n"
        "sys.stdout.write(repr(owners.reap_all(folder)))\n"
    )
    command = [sys.executable, "-c", code, str(outside), str(root), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "libc.mount" in ended.stderr:
        pytest.skip("mounting is not allowed here")
    assert "mounts=2, folders=1" in ended.stdout, ended.stderr
    assert (outside / "file").is_file() and not root.exists()


def test_what_a_living_owner_has_is_left_alone(tmp_path: Path, folder: Path) -> None:
    root = tmp_path / "root"
    entry = Registry(folder).enter(backend="native", root=root)
    (root / "one").mkdir(parents=True)
    helper = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        entry.add_process(helper.pid)
        entry.sandbox("one", "r")
        with killed_owner(folder, root / "other"):  # a dead one beside, and in the same root
            gone = Registry(folder).enter(backend="native", root=root)
            gone.sandbox("two", "r")
            (root / "two").mkdir()
            dead(folder, gone)
            assert len(reap_all(folder).owners) == 2
        assert helper.poll() is None
        assert sorted(path.name for path in root.iterdir()) == ["one", "other"]
    finally:
        helper.kill()
        helper.wait()
    entry.leave()
    entry.leave()
    entry.sandbox("late", "r")
    assert not folder.exists()


def test_a_number_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path, folder: Path) -> None:
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        entry = Registry(folder).enter(backend="native", root=tmp_path / "root")
        with (folder / f"{entry.id}.jsonl").open("a") as file:
            file.write(f'{{"what":"process","pid":{stranger.pid},"started":1}}\n')
        dead(folder, entry)
        assert reap_all(folder).processes == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_of_another_boot_only_folders_go(tmp_path: Path, folder: Path) -> None:
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        entry = Registry(folder).enter(backend="native", root=tmp_path / "root")
        entry.add_process(stranger.pid)
        entry.sandbox("one", "r")
        (tmp_path / "root" / "one" / "work").mkdir(parents=True)
        dead(folder, entry, boot="another")
        assert reap_all(folder) == Reaped(folders=1, owners=(str(tmp_path / "root"),))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_who_is_numbered_elsewhere_counts_as_living(tmp_path: Path, folder: Path) -> None:
    entry = Registry(folder).enter(backend="native", root=tmp_path / "root")
    dead(folder, entry, numbers="pid:[1]", host_started=1)
    assert not reap_all(folder)
    assert len(list(folder.iterdir())) == 1


@given(st.integers(0, 600))
@settings(max_examples=60, deadline=None)
def test_a_record_cut_anywhere_is_read_or_removed(cut: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, root = Path(scratch) / "registry", Path(scratch).resolve() / "root"
        entry = Registry(folder).enter(backend="native", root=root, label="é")
        for name in ("one", "two"):
            entry.sandbox(name, "r")
            (root / name / "work").mkdir(parents=True)
        entry.gone("one")
        dead(folder, entry)
        path = folder / f"{entry.id}.jsonl"
        whole = path.read_bytes()
        ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
        path.write_bytes(whole[:cut])
        head, one, two, gone = (cut >= end for end in ends)
        assert bool(reap_all(folder)) == head and not path.exists()
        left = {name for name, removed in (("one", one and not gone), ("two", two)) if not removed}
        assert {each.name for each in root.glob("*")} == left


def test_of_another_version_it_is_left_to_that_one(tmp_path: Path, folder: Path) -> None:
    entry = Registry(folder).enter(backend="native", root=tmp_path / "root")
    dead(folder, entry, schema=99, more="x")
    assert not reap_all(folder) and len(list(folder.iterdir())) == 1


def test_a_record_forgets_what_is_gone(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ROUND_BYTES", 2000)
    entry = Registry(folder).enter(backend="native", root=tmp_path / "root")
    entry._round_at = 2000
    entry.add_folder(tmp_path / "template")
    entry.add_cgroup(Path("/sys/fs/cgroup/none"))
    entry.add_process(os.getpid())
    for i in range(200):
        entry.sandbox(f"s{i}", "r")
        if i % 50:
            entry.gone(f"s{i}")
    path = folder / f"{entry.id}.jsonl"
    assert path.stat().st_size < 4000
    found = registry.read(path)
    assert found is not None and [made.id for made in found.sandboxes] == ["s0", "s50", "s100", "s150"]
    assert found.folders == (tmp_path / "template",) and len(found.cgroups) == len(found.helpers) == 1
    assert [each.name for each in folder.iterdir()] == [path.name]
    entry.leave()


def test_many_threads_say_and_nothing_is_lost(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ROUND_BYTES", 1000)
    entry = Registry(folder).enter(backend="native", root=tmp_path / "root")

    def say(name: str) -> None:
        for i in range(100):
            entry.sandbox(f"{name}{i}", "r")
            if i:
                entry.gone(f"{name}{i}")

    threads = [threading.Thread(target=say, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = registry.read(folder / f"{entry.id}.jsonl")
    assert found is not None and sorted(made.id for made in found.sandboxes) == ["a0", "b0", "c0"]
    entry.leave()


def test_a_full_disk_is_told(tmp_path: Path, folder: Path) -> None:
    entry = Registry(folder).enter(backend="native", root=tmp_path / "root")
    os.close(entry._file)
    entry._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(SandboxError, match="make room"):
        entry.sandbox("one", "r")
    entry.leave()
    assert not folder.exists()


def test_two_reapers_at_once_do_each_thing_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "_AT_ONCE", 5)
    for i in range(12):
        root = tmp_path / f"root{i}"
        entry = Registry(folder).enter(backend="native", root=root)
        for name in ("a", "b"):
            entry.sandbox(name, "r")
            for k in range(30):
                (root / name / str(k)).mkdir(parents=True)
        dead(folder, entry)
    results: list[Reaped] = []
    failures: list[Exception] = []

    def reaper() -> None:
        try:
            results.append(reap_all(folder))
        except (AssertionError, OSError, SandboxUnavailable) as error:
            failures.append(error)

    threads = [threading.Thread(target=reaper) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(each.folders for each in results) == 24 and sum(len(each.owners) for each in results) == 12
    assert not folder.exists() and not any((tmp_path / f"root{i}").exists() for i in range(12))


def test_entering_and_leaving_at_once_loses_no_record(tmp_path: Path, folder: Path) -> None:
    failures: list[Exception] = []

    def live() -> None:
        try:
            for _ in range(40):
                entry = Registry(folder).enter(backend="x", root=tmp_path / "root")
                entry.sandbox("s", "r")
                assert (folder / f"{entry.id}.jsonl").is_file()
                reap_all(folder)
                assert (folder / f"{entry.id}.jsonl").is_file()
                entry.leave()
        except (AssertionError, OSError, SandboxUnavailable) as error:
            failures.append(error)

    threads = [threading.Thread(target=live) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and not folder.exists()


def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, folder: Path) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(SandboxUnavailable, match="is a link"):
        Registry(folder).enter(backend="x", root=tmp_path)
    folder.unlink()
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for use in (lambda: Registry(folder).enter(backend="x", root=tmp_path), lambda: reap_all(folder)):
        with pytest.raises(SandboxUnavailable, match="mode 0755"):
            use()
    with pytest.raises(SandboxUnavailable, match="TMPDIR"):
        Registry(tmp_path / "no" / "such").enter(backend="x", root=tmp_path)


def test_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    plain = tmp_path / f"rollwright-{os.geteuid()}"
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Registry().folder == plain
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert Registry().folder == plain
    (tmp_path / "gone").mkdir()
    assert Registry().folder == tmp_path / "gone" / "rollwright"
    entry = Registry().enter(backend="x", root=tmp_path / "root")
    assert (tmp_path / "gone" / "rollwright").stat().st_mode & 0o777 == 0o700
    dead(entry._registry.folder, entry)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert not reap_all()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert len(reap_all().owners) == 1


def test_a_root_that_became_a_link_is_left_alone(tmp_path: Path, folder: Path) -> None:
    entry = Registry(folder).enter(backend="x", root=tmp_path / "root")
    entry.sandbox("one", "r")
    (tmp_path / "else" / "one").mkdir(parents=True)
    (tmp_path / "root").symlink_to(tmp_path / "else")
    dead(folder, entry)
    assert reap_all(folder).folders == 0
    assert (tmp_path / "else" / "one").is_dir()
