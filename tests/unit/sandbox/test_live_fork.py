"""Live forks: variables and files branch, walls and limits stay, parent and branch die as they should."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Guarantee, Limits, Sandbox, State
from rollwright.sandbox.native.live import GUESTS
from rollwright.sandbox.native.provider import NativeProvider
from rollwright.sandbox.probe import marked
from rollwright.types import CallStatus, Environment, File

pytestmark = pytest.mark.needs("namespaces")

SECONDS = 20.0
TABLE = Environment(
    sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)", files=(File(path="in/a.txt", text="a"),)
)
MARK = "import ctypes; ctypes.CDLL(None).prctl(15, {!r}.encode(), 0, 0, 0)"
BOMB = """
import os, time
with open('started', 'w'):
    pass
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
"""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[NativeProvider]:
    made = NativeProvider(tmp_path / "sandboxes", live=True)
    await made.start()
    yield made
    await made.close()
    log = tmp_path / "sandboxes" / "zygote.log"  # there is none where nothing was made
    assert not log.exists() or log.read_text() == ""


async def made(provider: NativeProvider, code: str = "x = 1") -> Sandbox:
    sandbox = await provider.create(TABLE, owner="r1")
    await value(sandbox, code)
    return sandbox


async def branch(sandbox: Sandbox) -> Sandbox:
    (fork,) = await sandbox.fork(live=True)
    return fork


async def value(sandbox: Sandbox, code: str) -> str | None:
    result = await sandbox.run_code(code, timeout=SECONDS)
    assert result.status is CallStatus.OK, result
    return result.value


async def rows(sandbox: Sandbox) -> list[object]:
    result = await sandbox.sql("SELECT a FROM t ORDER BY a", timeout=SECONDS)
    assert result.rows is not None, result
    return [row[0] for row in result.rows.rows]


async def test_variables_branch(provider: NativeProvider) -> None:
    sandbox = await made(provider, "x = {'n': [1]}\ndef f(): return x['n']")
    fork = await branch(sandbox)
    await value(fork, "x['n'].append(2)")
    await value(sandbox, "x['n'].append(3)")
    assert await value(fork, "f()") == "[1, 2]" and await value(sandbox, "f()") == "[1, 3]"
    told = fork.info()
    assert (told.backend, told.forked, told.parent, told.owner) == ("native-live", "live", sandbox.id, "r1")
    assert (await value(fork, "import os; os.environ['OMP_NUM_THREADS']")) == "'1'"


async def test_files_branch_for_everybody(provider: NativeProvider) -> None:
    """Interpreter, programs, database and host see the branch's, and the parent's stay."""
    sandbox = await made(provider, "import os; os.chdir('in')")
    assert await rows(sandbox) == [1]
    fork = await branch(sandbox)
    await value(fork, "open('a.txt', 'a').write('b'); open('/work/new', 'w').write('n')")
    await value(sandbox, "open('a.txt', 'a').write('c')")
    assert await value(fork, "os.getcwd(), open('a.txt').read()") == "('/work/in', 'ab')"
    assert await fork.files.read("in/a.txt") == b"ab" and await sandbox.files.read("in/a.txt") == b"ac"
    assert (await fork.exec("cat in/a.txt new", timeout=SECONDS)).stdout == "abn"
    assert (await sandbox.exec("cat in/a.txt; ls", timeout=SECONDS)).stdout == "acdata.db\nin\n"
    await fork.sql("INSERT INTO t VALUES (2)", timeout=SECONDS)
    assert await rows(fork) == [1, 2] and await rows(sandbox) == [1]
    await fork.files.write("from_host", b"1")
    assert await value(fork, "open('/work/from_host').read()") == "'1'"


async def test_what_is_open_is_open_in_the_branch_too(provider: NativeProvider) -> None:
    sandbox = await made(provider, "f = open('log', 'w+'); f.write('one '); f.flush(); g = open('in/a.txt')")
    await value(sandbox, "import sqlite3; db = sqlite3.connect('own.db'); db.execute('CREATE TABLE s(a)')")
    fork = await branch(sandbox)
    for each, word in ((sandbox, "parent"), (fork, "branch")):
        await value(each, f"f.write({word!r}); f.flush(); db.execute('INSERT INTO s VALUES (?)', [{word!r}])")
        await value(each, "db.commit()")
    for each, word in ((sandbox, "parent"), (fork, "branch")):
        assert await value(each, "f.seek(0); f.read()") == repr(f"one {word}")
        assert await value(each, "db.execute('SELECT a FROM s').fetchall()") == repr([(word,)])
        assert await each.files.read("log") == f"one {word}".encode()
        assert await value(each, "g.read()") == "'a'"


async def test_what_cannot_be_taken_along_is_refused(provider: NativeProvider) -> None:
    """With the reason; the interpreter goes on."""
    sandbox = await made(provider, "import threading; e = threading.Event(); x = 7")
    await value(sandbox, "t = threading.Thread(target=e.wait); t.start()")
    with pytest.raises(SandboxError, match="2 threads"):
        await branch(sandbox)
    await value(sandbox, "e.set(); t.join(); f = open('/tmp/elsewhere', 'w')")
    with pytest.raises(SandboxError, match="/tmp/elsewhere is open for writing"):
        await branch(sandbox)
    assert provider.live == 1
    await value(sandbox, "f.close(); g = open('kept', 'w'); g.write('1'); g.flush(); h = open('/tmp/h', 'w')")
    with pytest.raises(SandboxError, match="/tmp/h"):
        await branch(sandbox)
    await value(sandbox, "g.write('2'); g.close(); h.close()")
    assert await sandbox.files.read("kept") == b"12"
    assert await value(await branch(sandbox), "x") == "7"


async def test_an_interpreter_that_lies_or_hangs_forks_nothing(provider: NativeProvider) -> None:
    for trick in ("kernel.fork_beside = lambda: 1", "kernel.fork_beside = lambda: os._exit(3)"):
        sandbox = await made(provider, f"import os; from rollwright.sandbox.native import kernel; {trick}")
        with pytest.raises(SandboxError):
            await branch(sandbox)
        assert await rows(sandbox) == [1]
        await sandbox.kill()
    assert provider.live == 0


async def test_a_large_heap(provider: NativeProvider) -> None:
    sandbox = await made(provider, "x = bytearray(50 * 2**20); x[-1] = 1")
    fork = await branch(sandbox)
    await value(fork, "x[-1] = 2; x[0] = 9")
    assert await value(fork, "len(x), x[0], x[-1]") == f"({50 * 2**20}, 9, 2)"
    assert await value(sandbox, "x[0], x[-1]") == "(0, 1)"


async def test_branches_of_branches(provider: NativeProvider) -> None:
    """Deeper than the kernel nests namespaces; the end of one in the middle ends no other."""
    chain = [await made(provider, "x = []")]
    for depth in range(35):
        await value(chain[-1], f"x.append({depth}); open('{depth}', 'w').write('')")
        chain.append(await branch(chain[-1]))
        if depth % 2:
            await chain.pop(-2).kill()
    assert await value(chain[-1], "x") == str(list(range(35)))
    assert len(await chain[-1].files.list()) == 35 + 2
    assert await rows(chain[-1]) == [1]


async def test_a_branch_is_snapshotted_restored_and_forked(provider: NativeProvider) -> None:
    fork = await branch(await made(provider))
    await fork.files.write("kept", b"1")
    snapshot = await fork.snapshot()
    await value(fork, "open('later', 'w').write(str(x)); x = 2")
    assert await value(fork, "import os; sorted(os.listdir())") == "['data.db', 'in', 'kept', 'later']"
    (copy,) = await fork.fork()
    assert copy.info().forked == "filesystem" and await copy.files.read("later") == b"1"
    await fork.restore(snapshot)
    assert (await fork.run_code("x", timeout=SECONDS)).status is CallStatus.ERROR  # variables are gone
    assert "later" not in await fork.files.list() and await rows(fork) == [1]
    await snapshot.drop()
    again = await branch(fork)
    assert await value(again, "import os; os.path.exists('/proc/self/fd'), os.listdir()") is not None


async def test_a_branch_that_is_cut_goes_on_alone(provider: NativeProvider) -> None:
    """A deadline costs the variables, as elsewhere; the new interpreter needs no parent."""
    sandbox = await made(provider)
    fork = await branch(sandbox)
    assert (await fork.run_code("while True: pass", timeout=0.2)).status is CallStatus.TIMEOUT
    assert (await fork.run_code("x", timeout=SECONDS)).status is CallStatus.ERROR
    assert await value(sandbox, "x") == "1"
    await sandbox.kill()
    assert await value(fork, "1 + 1") == "2"


async def test_the_parents_end_ends_its_branches(provider: NativeProvider) -> None:
    sandbox = await made(provider)
    fork = await branch(sandbox)
    leaf = await branch(fork)
    await value(leaf, MARK.format("rw-live-leaf"))
    await fork.kill()
    assert await value(leaf, "x") == "1" and await value(sandbox, "x") == "1"
    await sandbox.kill()
    assert marked("rw-live-leaf") == []
    with pytest.raises(SandboxLost, match=sandbox.id):
        await leaf.run_code("x", timeout=SECONDS)
    with pytest.raises(SandboxLost):
        await leaf.files.list()
    assert leaf.info().state is State.KILLED
    await leaf.kill()
    assert provider.live == 0


async def test_a_fork_bomb_in_a_branch_ends_with_it(provider: NativeProvider) -> None:
    sandbox = await made(provider)
    fork = await branch(sandbox)
    await value(fork, MARK.format("rw-live-bomb"))
    call = asyncio.create_task(fork.run_code(BOMB, timeout=SECONDS))
    while "started" not in await fork.files.list() or len(marked("rw-live-bomb")) < 10:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await fork.kill()
    assert marked("rw-live-bomb") == []
    with contextlib.suppress(SandboxLost):
        await call
    assert await value(sandbox, "x") == "1"
    assert (await sandbox.exec("echo ok", timeout=SECONDS)).stdout == "ok\n"


async def test_pauses_are_of_one(provider: NativeProvider) -> None:
    sandbox = await made(provider)
    fork = await branch(sandbox)
    for paused, other in ((sandbox, fork), (fork, sandbox)):
        await paused.pause()
        call = asyncio.create_task(paused.run_code("x", timeout=SECONDS))
        assert await value(other, "x") == "1"
        assert not call.done()
        await paused.resume()
        assert (await call).value == "1"


async def test_twenty_branches_and_nothing_left(provider: NativeProvider) -> None:
    sandbox = await made(provider, MARK.format("rw-live-many") + "; x = 1")
    held = []
    for _ in range(2):
        branches = await sandbox.fork(20, live=True)
        for number, each in enumerate(branches):
            assert await value(each, f"x += {number}; x") == str(1 + number)
        assert (await sandbox.exec("echo ok", timeout=SECONDS)).stdout == "ok\n"
        assert (await branches[0].exec("echo ok", timeout=SECONDS)).stdout == "ok\n"
        for each in branches:
            await each.kill()
        assert len(marked("rw-live-many")) == 1 and provider.live == 1
        held.append(len(os.listdir("/proc/self/fd")))
    assert held[0] == held[1]  # those of idle nests
    await value(sandbox, "x")
    await sandbox.kill()
    assert marked("rw-live-many") == []


async def test_more_than_it_holds_are_refused(tmp_path: Path) -> None:
    provider = NativeProvider(tmp_path / "sandboxes", live=True, max_live=2 * GUESTS, require=())
    await provider.start()
    try:
        sandbox = await made(provider)
        with pytest.raises(SandboxError, match=f"at most {GUESTS}"):
            await sandbox.fork(GUESTS + 1, live=True)
        assert provider.live == 1 and await value(sandbox, "x") == "1"
    finally:
        await provider.close()


async def test_walls_stand_in_a_branch(provider: NativeProvider) -> None:
    """No user namespace, no layers, no way above the root with the one capability that is left."""
    fork = await branch(await made(provider, "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)"))
    climbed = """
    os.mkdir('cell')
    start = os.open('/', os.O_RDONLY)
    os.chroot('cell')
    os.fchdir(start)
    for _ in range(40):
        os.chdir('..')
    os.chroot('.')
    sorted(os.listdir('/'))"""
    names = await value(
        fork,
        "\n".join(
            line.strip() if "chdir('..')" not in line else "    os.chdir('..')"
            for line in climbed.splitlines()
        ),
    )
    assert names is not None and "'work'" in names and "own" not in names and "layers" not in names
    assert (
        await value(fork, "libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)") == "(-1, -1)"
    )
    status = await value(fork, "[l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')]")
    assert status == f"['{1 << 18:016x}']"
    program = await value(
        fork,
        "import subprocess; subprocess.run(['grep', 'CapEff', '/proc/self/status'], "
        "capture_output=True, text=True).stdout.split()[1]",
    )
    assert program == f"'{0:016x}'"


async def test_what_is_declared(provider: NativeProvider) -> None:
    """Only the number of processes is kept less well than without live forks."""
    assert provider.guarantees.pids is Guarantee.BEST_EFFORT
    assert provider.guarantees.missing(["fs", "net", "disk", "kill"]) == []


async def test_without_the_mode_it_is_refused(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(Limits(), memory_bytes=128 * 2**20)
    provider = NativeProvider(tmp_path / "sandboxes", limits=limits)
    await provider.start()
    try:
        with pytest.raises(SandboxError, match="live = true"):
            await branch(await made(provider))
    finally:
        await provider.close()
