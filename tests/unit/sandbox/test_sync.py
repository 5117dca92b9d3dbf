"""Sandboxes without `await`: the same answers, from any thread, whatever interrupts them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import getmembers, isfunction, signature
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import Files, Sandbox, SandboxProvider, Snapshot, State
from rollwright.sandbox.sync import SyncFiles, SyncSandbox, SyncSandboxes, SyncSnapshot
from rollwright.testing.memory_sandboxes import MemorySandbox, MemorySandboxes, MemorySnapshot
from rollwright.types import Environment, File

START = Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)", files=(File(path="a.txt", text="a"),))


@pytest.fixture
def sandboxes() -> Iterator[SyncSandboxes]:
    with SyncSandboxes(MemorySandboxes()) as made:
        yield made


def test_a_script_from_create_to_kill(sandboxes: SyncSandboxes, tmp_path: Path) -> None:
    with sandboxes.create(START, owner="me") as sandbox:
        assert sandbox.run_code("x = 6", timeout=5).value is None
        assert sandbox.run_code("x * 7", timeout=5).value == "42"
        assert sandbox.exec("ls", timeout=5).exit_code == 127
        snapshot = sandbox.snapshot()
        sandbox.files.write("b/c", b"1")
        assert sandbox.files.list() == ["a.txt", "b/c"] and sandbox.files.list("b") == ["b/c"]
        sandbox.files.upload(sandbox.files.download("b"), "d")
        assert sandbox.files.read("d/c") == b"1"
        sandbox.files.remove("b")
        sandbox.sql("DELETE FROM t", timeout=5)
        one, two = sandbox.fork(2)
        assert one.files.list() == ["a.txt", "d/c"] and two.info().parent == sandbox.id
        sandbox.restore(snapshot)
        found = sandbox.sql("SELECT a FROM t WHERE a = ?", timeout=5, parameters=[1])
        assert found.rows is not None and found.rows.rows == ((1,),)
        loaded = sandboxes.load(snapshot.save(tmp_path))
        assert sandboxes.create(owner="me", snapshot=loaded).files.list() == ["a.txt"]
        snapshot.drop()
        sandbox.pause()
        assert sandbox.info().state is State.PAUSED
        sandbox.resume()
        sandbox.set_timeout(600)
        assert sandboxes.connect(sandbox.id).files.read("a.txt") == b"a"
        assert sandboxes.live == 4 <= sandboxes.capacity
        assert sandbox.guarantees == sandboxes.guarantees and sandbox.limits == one.limits
    assert sandboxes.live == 3 and sandbox.info().state is State.KILLED
    with pytest.raises(SandboxLost):
        sandbox.files.read("a.txt")
    sandbox.kill()


@pytest.mark.parametrize(
    ("face", "ours"),
    [(Sandbox, SyncSandbox), (Files, SyncFiles), (Snapshot, SyncSnapshot), (SandboxProvider, SyncSandboxes)],
)
def test_it_mirrors_the_protocol(face: type, ours: type) -> None:
    for name, method in getmembers(face, isfunction):
        if not name.startswith("_"):
            assert list(signature(getattr(ours, name)).parameters) == list(signature(method).parameters), name
    for name in (name for name, _ in getmembers(face, lambda each: isinstance(each, property))):
        assert isinstance(getattr(ours, name), property), name


def test_errors_are_those_of_the_provider(sandboxes: SyncSandboxes, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="net"):
        sandboxes.create(owner="me", require=["net"])
    with pytest.raises(SandboxError, match="NONSENSE"):
        sandboxes.create(Environment(sql="CREATE NONSENSE"), owner="me")
    with pytest.raises(SandboxLost):
        sandboxes.connect("nothing")
    with pytest.raises(SandboxError):
        sandboxes.load(tmp_path / "nothing")
    with sandboxes.create(owner="me") as sandbox, pytest.raises(PermissionError):
        sandbox.files.read("../x")
    assert sandboxes.live == 0


async def test_it_works_within_a_running_loop_and_blocks_it(sandboxes: SyncSandboxes) -> None:
    other = asyncio.create_task(asyncio.sleep(0))
    with sandboxes.create(owner="me") as sandbox:
        assert sandbox.run_code("1 + 1", timeout=5).value == "2"
        assert not other.done()
    await other


def test_many_threads_may_call(sandboxes: SyncSandboxes) -> None:
    values: list[str | None] = []

    def work(number: int) -> None:
        with sandboxes.create(owner=f"r{number}") as sandbox:
            sandbox.run_code(f"x = {number}", timeout=5)
            values.append(sandbox.run_code("x", timeout=5).value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, values)) == [str(number) for number in range(8)] and sandboxes.live == 0


def test_close_ends_everything_and_calls_under_way(sandboxes: SyncSandboxes) -> None:
    provider: MemorySandboxes = sandboxes._provider  # type: ignore[assignment]
    sandbox, ended = sandboxes.create(owner="me"), list[str]()
    sandbox.pause()

    def wait() -> None:
        try:
            sandbox.run_code("1", timeout=600)
        except SandboxLost:
            ended.append("lost")

    waiting = threading.Thread(target=wait)
    waiting.start()
    sandboxes.close()
    waiting.join()
    sandboxes.close()
    assert ended == ["lost"] and provider.live == 0
    assert not any(thread.name == "rollwright-sandboxes" for thread in threading.enumerate())
    for call in (lambda: sandboxes.create(owner="me"), lambda: sandbox.files.list(), lambda: sandbox.fork()):
        with pytest.raises(SandboxLost, match="closed"):
            call()
    sandbox.kill()


def test_it_may_be_started_again(sandboxes: SyncSandboxes) -> None:
    sandboxes.close()
    assert sandboxes.start() is sandboxes.start()
    sandboxes.create(owner="me").kill()


def test_a_start_that_fails_leaves_no_thread() -> None:
    class Weak(MemorySandboxes):
        async def start(self) -> None:
            raise SandboxUnavailable("no walls")

    with pytest.raises(SandboxUnavailable), SyncSandboxes(Weak()):
        raise AssertionError("it started")
    assert not any(thread.name == "rollwright-sandboxes" for thread in threading.enumerate())


# Ctrl-C.


class Held(MemorySandboxes):
    """Sandboxes that are long in coming and going: `held` is set when `what` is under way."""

    def __init__(self, what: str, *, stubborn: bool = False) -> None:
        super().__init__()
        self.what, self.stubborn, self.held, self.go = what, stubborn, threading.Event(), threading.Event()

    async def hold(self, what: str) -> None:
        if what == self.what:
            self.held.set()
            with suppress(*[asyncio.CancelledError] if self.stubborn else []):
                while not self.go.is_set():  # noqa: ASYNC110 - set in another thread
                    await asyncio.sleep(0.005)

    async def create(self, *args: Any, **more: Any) -> MemorySandbox:
        await self.hold("create")
        made = await super().create(*args, **more)
        kill, fork = made.kill, made.fork

        async def slow_kill() -> None:
            await self.hold("kill")
            await kill()

        async def slow_fork(count: int = 1, *, live: bool = False) -> list[Sandbox]:
            branches = await fork(count, live=live)
            await self.hold("fork")
            return branches

        made.kill, made.fork = slow_kill, slow_fork  # type: ignore[method-assign]
        return made

    async def load(self, path: Path) -> MemorySnapshot:
        await self.hold("load")
        return await super().load(path)

    async def close(self) -> None:
        await self.hold("close")
        await super().close()


def interrupted(provider: Held, call: Callable[[], object], *, go: bool = False) -> None:
    """Make the call and press Ctrl-C while it is under way; `go` lets it end after that."""
    main = threading.get_ident()

    def press() -> None:
        assert provider.held.wait(10)
        signal.pthread_kill(main, signal.SIGINT)
        if go:
            provider.go.set()

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    pressing.join()


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_interrupted_create_leaves_no_sandbox(stubborn: bool) -> None:
    provider = Held("create", stubborn=stubborn)
    with SyncSandboxes(provider) as sandboxes:
        interrupted(provider, lambda: sandboxes.create(owner="me"))
        assert provider.live == 0
        provider.go.set()
        sandboxes.create(owner="me").kill()


def test_an_interrupted_fork_leaves_its_sandbox_alone() -> None:
    provider = Held("fork", stubborn=True)
    with SyncSandboxes(provider) as sandboxes:
        sandbox = sandboxes.create(owner="me")
        interrupted(provider, lambda: sandbox.fork(3))
        assert list(provider.open) == ["me"]
        assert sandbox.run_code("1", timeout=5).value == "1"


@pytest.mark.parametrize("what", ["kill", "close"])
def test_an_interrupted_end_goes_on_to_its_end(what: str) -> None:
    provider = Held(what)
    sandboxes = SyncSandboxes(provider).start()
    sandbox = sandboxes.create(owner="me")
    interrupted(provider, sandbox.kill if what == "kill" else sandboxes.close, go=True)
    assert provider.live == 0
    sandboxes.close()


def test_a_second_interrupt_ends_the_wait_and_close_may_be_called_again() -> None:
    provider = Held("close")
    sandboxes = SyncSandboxes(provider).start()
    sandboxes.create(owner="me")
    main, gone, armed = threading.get_ident(), threading.Event(), [True]

    def handle(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    def press() -> None:
        assert provider.held.wait(10)
        while not gone.is_set():  # a second one that comes while the first is raised is lost
            signal.pthread_kill(main, signal.SIGINT)
            gone.wait(0.3)

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=press)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sandboxes.close()
        armed.clear()
        gone.set()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert provider.live == 1
    provider.go.set()
    sandboxes.close()
    assert provider.live == 0


# Ends of processes.

SCRIPT = """
import sys
from rollwright.sandbox.sync import SyncSandboxes
from rollwright.testing.memory_sandboxes import MemorySandboxes
class Told(MemorySandboxes):
    async def close(self):
        await super().close()
        print("closed", self.live, flush=True)
SyncSandboxes(Told()).start().create(owner="me")
"""


def test_the_end_of_a_script_closes_what_it_left() -> None:
    ended = subprocess.run([sys.executable, "-I", "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("closed 0\n", "", 0)


def test_a_forked_process_is_refused_and_ends_nothing(sandboxes: SyncSandboxes) -> None:
    sandbox = sandboxes.create(owner="me")
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            try:
                sandbox.files.list()
            except SandboxLost:
                sandboxes.close()
                code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox.files.list() == []
