"""What every sandbox backend must do: functional checks, and escapes that must end as the backend declares.

Role: the conformance suite of `SandboxProvider`. Neighbours: our tests run it over each backend, a plug-in's
tests can too. Invariant: declared = observed: a check fails when a guarantee is claimed and not kept, and
when it is kept and not claimed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Guarantee, Limits, Sandbox, SandboxProvider
from rollwright.types import CallStatus, Environment, ExecResult, File

Check = Callable[[SandboxProvider], Awaitable[None]]
CHECKS: list[Check] = []
"""Each takes a started provider and raises `AssertionError` where it does not conform."""

SECONDS = 20.0
"""Deadline of calls that should end by themselves."""
_SINGLE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that a backend may set, so that what runs in it has one thread."""
SMALL = Limits(memory_bytes=256 * 2**20, file_bytes=2**20, output_bytes=2**12)


def check(function: Check) -> Check:
    """Add to the suite."""
    CHECKS.append(function)
    return function


async def make(provider: SandboxProvider, environment: Environment | None = None) -> Sandbox:
    """A sandbox with small limits."""
    return await provider.create(environment or Environment(), owner="conformance", limits=SMALL)


def expect(result: ExecResult, status: CallStatus) -> ExecResult:
    """Fail with the whole result where the status is another."""
    assert result.status is status, f"expected {status}, got {result}"
    return result


async def value(sandbox: Sandbox, code: str) -> str | None:
    """The repr of the last expression of code that must run."""
    return expect(await sandbox.run_code(code, timeout=SECONDS), CallStatus.OK).value


@check
async def python_keeps_variables(provider: SandboxProvider) -> None:
    """Variables stay, output and last value come back, wrong code is an observation."""
    sandbox = await make(provider)
    assert await value(sandbox, "x = 20") is None
    assert await value(sandbox, "x + 1") == "21"
    printed = expect(await sandbox.run_code("print('a'); print('b'); 3", timeout=SECONDS), CallStatus.OK)
    assert (printed.stdout, printed.value) == ("a\nb\n", "3")
    wrong = expect(await sandbox.run_code("1/0", timeout=SECONDS), CallStatus.ERROR)
    assert wrong.stderr.strip().endswith("ZeroDivisionError: division by zero")
    for nonsense in ("(", "\0", "\ud800", "x = '\\ud800'\nx", "raise BaseException", "exit(3)"):
        await sandbox.run_code(nonsense, timeout=SECONDS)
    assert await value(sandbox, "x") == r"'\ud800'"
    await sandbox.kill()


@check
async def sql_answers_typed_rows(provider: SandboxProvider) -> None:
    """Result sets are typed; wrong and odd statements are observations; agent Python sees the same file."""
    sandbox = await make(
        provider, Environment(sql="CREATE TABLE t(a, b); INSERT INTO t VALUES (1,'x'),(2.5,NULL)")
    )
    found = expect(await sandbox.sql("SELECT a, b FROM t ORDER BY a", timeout=SECONDS), CallStatus.OK)
    assert found.rows is not None
    assert (found.rows.columns, found.rows.rows) == (("a", "b"), ((1, "x"), (2.5, None)))
    one = await sandbox.sql("SELECT b FROM t WHERE a = ?", timeout=SECONDS, parameters=[1])
    assert one.rows is not None and one.rows.rows == (("x",),)
    assert expect(await sandbox.sql("DELETE FROM t WHERE a=1", timeout=SECONDS), CallStatus.OK).rows is None
    for wrong in ("SELECT * FROM nothing", "", "SELECT 1; SELECT 2", "SELECT ?", "\0", "x" * 10**5):
        assert (await sandbox.sql(wrong, timeout=SECONDS)).status in (CallStatus.ERROR, CallStatus.OK)
    for odd in ("SELECT x'00ff'", "SELECT 9e999", "SELECT CAST(x'ff' AS TEXT)", "SELECT 9223372036854775807"):
        expect(await sandbox.sql(odd, timeout=SECONDS), CallStatus.OK)
    assert (
        await value(
            sandbox, "import sqlite3; sqlite3.connect('data.db').execute('SELECT a FROM t').fetchall()"
        )
        == "[(2.5,)]"
    )
    await sandbox.kill()


@check
async def sql_reaches_no_other_file(provider: SandboxProvider) -> None:
    """No ATTACH, no extension, no setting."""
    sandbox = await make(provider, Environment(sql="CREATE TABLE t(a)"))
    refused = (
        "ATTACH 'other.db' AS o",
        "VACUUM INTO 'copy.db'",
        "SELECT load_extension('x')",
        "PRAGMA journal_mode=OFF",
        "PRAGMA temp_store_directory='/tmp'",
        "PRAGMA writable_schema=ON",
    )
    for statement in refused:
        expect(await sandbox.sql(statement, timeout=SECONDS), CallStatus.ERROR)
    assert await value(sandbox, "import os; sorted(os.listdir())") == "['data.db']"
    await sandbox.kill()


@check
async def agent_python_cannot_bend_sql(provider: SandboxProvider) -> None:
    """What the agent's interpreter patches doesn't change what SQL answers."""
    sandbox = await make(provider, Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)"))
    await sandbox.run_code(
        "import sqlite3, json\njson.dumps = lambda *a, **k: '{}'\nsqlite3.connect = None", timeout=SECONDS
    )
    found = await sandbox.sql("SELECT a FROM t", timeout=SECONDS)
    assert found.rows is not None and found.rows.rows == ((1,),)
    await sandbox.kill()


@check
async def programs_run(provider: SandboxProvider) -> None:
    """Exit codes, output, input, deadline."""
    sandbox = await make(provider, Environment(files=(File(path="deep/note.txt", text="hello"),)))
    shown = expect(await sandbox.exec(["cat", "deep/note.txt"], timeout=SECONDS), CallStatus.OK)
    assert (shown.stdout, shown.exit_code) == ("hello", 0)
    assert (await sandbox.exec(["cat"], timeout=SECONDS, stdin="x" * 10**5)).status is CallStatus.OUTPUT
    assert (await sandbox.exec(["cat"], timeout=SECONDS, stdin="in")).stdout == "in"
    failed = expect(
        await sandbox.exec(["sh", "-c", "echo no >&2; exit 3"], timeout=SECONDS), CallStatus.ERROR
    )
    assert (failed.stderr, failed.exit_code) == ("no\n", 3)
    assert (await sandbox.exec("echo $((6 * 7)) | cat", timeout=SECONDS)).stdout == "42\n"
    for wrong in ([], ["no-such-program"], ["\0"], "exit 3", "\0"):
        expect(await sandbox.exec(wrong, timeout=SECONDS), CallStatus.ERROR)
    expect(await sandbox.exec(["sleep", "60"], timeout=0.2), CallStatus.TIMEOUT)
    await sandbox.kill()


@check
async def limits_end_in_a_status(provider: SandboxProvider) -> None:
    """Deadline, output and memory each end in their status, and the sandbox goes on."""
    sandbox = await make(provider, Environment(sql="CREATE TABLE t(a)"))
    endless = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM r) SELECT "
    expect(await sandbox.run_code("while True: pass", timeout=0.2), CallStatus.TIMEOUT)
    expect(await sandbox.run_code("while True: print('x' * 1000)", timeout=SECONDS), CallStatus.OUTPUT)
    expect(await sandbox.run_code("'x' * 10**6", timeout=SECONDS), CallStatus.OUTPUT)
    expect(await sandbox.run_code("bytearray(10**9)", timeout=SECONDS), CallStatus.MEMORY)
    expect(await sandbox.exec(["yes"], timeout=SECONDS), CallStatus.OUTPUT)
    expect(await sandbox.sql(endless + "count(*) FROM r", timeout=0.2), CallStatus.TIMEOUT)
    expect(await sandbox.sql(endless + "i FROM r", timeout=SECONDS), CallStatus.OUTPUT)
    expect(await sandbox.sql("SELECT 1", timeout=SECONDS), CallStatus.OK)
    assert await value(sandbox, "1 + 1") == "2"
    await sandbox.kill()


@check
async def the_agent_cannot_void_its_rollout(provider: SandboxProvider) -> None:
    """Ending, killing or confusing its own interpreter is an observation, never `SandboxLost`."""
    sandbox = await make(provider, Environment(sql="CREATE TABLE t(a)"))
    for code in (
        "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.write(3, b'x' * 99)",
    ):
        ended = await sandbox.run_code(code, timeout=SECONDS)
        assert ended.status in (CallStatus.ERROR, CallStatus.LOST), ended
    expect(await sandbox.sql("SELECT count(*) FROM t", timeout=SECONDS), CallStatus.OK)
    assert await value(sandbox, "import os\nif os.fork() == 0: 1\n7") == "7"
    assert await value(sandbox, "8") == "8"
    await sandbox.kill()


@check
async def paths_stay_inside(provider: SandboxProvider) -> None:
    """Absolute paths, `..`, links, FIFOs and folders are refused."""
    sandbox = await make(provider)
    await sandbox.files.write("a/b/c.txt", b"data")
    assert await sandbox.files.read("a/b/c.txt") == b"data"
    await value(
        sandbox, "import os; os.symlink('/etc', 'link'); os.symlink('/etc/passwd', 'file'); os.mkfifo('fifo')"
    )
    for path in (
        "/etc/passwd",
        "../owners.jsonl",
        "a/../../owners.jsonl",
        "link/passwd",
        "file",
        "fifo",
        "a",
        "",
        ".",
    ):
        for action in (sandbox.files.read(path), sandbox.files.write(path, b"x")):
            try:
                await action
            except PermissionError:
                continue
            raise AssertionError(f"{path!r} was accepted")
    for missing in ("nothing", "nowhere/nothing"):
        try:
            await sandbox.files.read(missing)
        except FileNotFoundError:
            continue
        raise AssertionError("a missing file was read")
    await sandbox.kill()


@check
async def a_snapshot_branches(provider: SandboxProvider) -> None:
    """A fork has the files and the database of that moment, and says what it is."""
    sandbox = await make(provider, Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES ('it''s')"))
    await sandbox.files.write("notes/a.txt", "ä".encode())
    (branch,) = await sandbox.fork()
    await sandbox.sql("DELETE FROM t", timeout=SECONDS)
    await sandbox.files.write("notes/a.txt", b"changed")
    found = await branch.sql("SELECT a FROM t", timeout=SECONDS)
    assert found.rows is not None and found.rows.rows == (("it's",),)
    assert await branch.files.read("notes/a.txt") == "ä".encode()
    told = branch.info()
    assert (told.parent, told.forked, told.owner) == (sandbox.id, "filesystem", "conformance")
    assert [path for path in await branch.files.list() if not path.startswith("data.db")] == ["notes/a.txt"]
    await branch.kill()
    await sandbox.kill()


@check
async def a_database_with_broken_references_branches(provider: SandboxProvider) -> None:
    """What an agent left of its references is no reason to lose the database."""
    sql = "CREATE TABLE a(id PRIMARY KEY); CREATE TABLE b(a REFERENCES a(id)); INSERT INTO b VALUES (7)"
    sandbox = await make(provider, Environment(sql=sql))
    (branch,) = await sandbox.fork()
    found = await branch.sql("SELECT a FROM b", timeout=SECONDS)
    assert found.rows is not None and found.rows.rows == ((7,),)
    await branch.kill()
    await sandbox.kill()


@check
async def nothing_is_left_over(provider: SandboxProvider) -> None:
    """Daemons, deep folders and data are gone after `kill`, which may be called at once from several
    sides."""
    from rollwright.sandbox.probe import DAEMON, marked

    sandbox = await make(provider, Environment(sql="CREATE TABLE secret(a)"))
    mark = f"rw-{sandbox.id[:12]}"
    folder = Path((await value(sandbox, "import os; os.getcwd()") or "").strip("'"))
    await value(
        sandbox,
        "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')\nos.chdir(" + repr(str(folder)) + ")",
    )
    expect(await sandbox.run_code(DAEMON.format(mark=mark), timeout=SECONDS), CallStatus.OK)
    assert marked(mark), "the daemon does not run"
    await sandbox.files.write(mark, b"")
    killing = [asyncio.create_task(sandbox.kill()) for _ in range(3)]
    await asyncio.gather(*killing)
    assert not (folder / mark).exists()
    assert (provider.guarantees.kill is Guarantee.ABSENT) == bool(marked(mark))
    for call in (
        sandbox.sql("SELECT 1", timeout=1),
        sandbox.run_code("1", timeout=1),
        sandbox.files.read("daemon"),
    ):
        try:
            await call
        except SandboxLost:
            continue
        raise AssertionError("a killed sandbox answered")
    fresh = await make(provider)
    gone = await fresh.sql("SELECT * FROM secret", timeout=SECONDS)
    assert "no such table" in gone.stderr
    await fresh.kill()


def running(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@check
async def killing_ends_a_call_in_flight(provider: SandboxProvider) -> None:
    """A waiting call learns it as `SandboxLost`."""
    sandbox = await make(provider)
    call = asyncio.create_task(sandbox.run_code("import time; time.sleep(600)", timeout=600))
    while not sandbox_busy(sandbox):  # noqa: ASYNC110 - nothing tells when a call has begun
        await asyncio.sleep(0.001)
    await sandbox.kill()
    try:
        await call
    except SandboxLost:
        return
    raise AssertionError("the call outlived its sandbox")


def sandbox_busy(sandbox: Sandbox) -> bool:
    """Whether a call holds the sandbox's turn; True where a backend doesn't show it."""
    turn = getattr(sandbox, "_turn", None)
    return turn is None or turn.locked()


@check
async def a_cancelled_call_leaves_the_sandbox_in_step(provider: SandboxProvider) -> None:
    """The reply to a cancelled call is never taken for the next one's."""
    sandbox = await make(provider, Environment(sql="CREATE TABLE t(a); INSERT INTO t VALUES (5)"))
    for call in (
        sandbox.run_code("import time; time.sleep(600)", timeout=600),
        sandbox.sql("SELECT 1", timeout=60),
    ):
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert await value(sandbox, "40 + 2") == "42"
    found = await sandbox.sql("SELECT a FROM t", timeout=SECONDS)
    assert found.rows is not None and found.rows.rows == ((5,),)
    await sandbox.kill()


@check
async def a_wrong_script_makes_no_sandbox(provider: SandboxProvider) -> None:
    """`create` raises, and leaves nothing."""
    try:
        await make(provider, Environment(sql="CREATE NONSENSE"))
    except SandboxError as error:
        assert "NONSENSE" in str(error)
        return
    raise AssertionError("a wrong script was accepted")


@check
async def the_environment_is_empty(provider: SandboxProvider) -> None:
    """No variables of the host, no open descriptors."""
    sandbox = await make(provider)
    names = f"import os; sorted(os.environ.keys() - {set(_SINGLE)})"
    assert await value(sandbox, names) == "['HOME', 'LANG', 'PATH', 'TMPDIR']"
    tried = "def attempt(n):\n try: return os.fstat(n)\n except OSError: pass\n"
    assert await value(sandbox, tried + "[n for n in range(100) if attempt(n)]") == "[0, 1, 2, 3]"
    await sandbox.kill()


def _near(work: Path, apart: Path) -> Path:
    """The folder that the sandboxes of a provider lie in; `apart` where they have a root of their own."""
    return apart if work.parent == Path("/") else work.parent


@check
async def guarantees_are_what_happens(provider: SandboxProvider) -> None:
    """Each declared guarantee against an attempt; what the host can see itself is not asked of the agent."""
    from rollwright.sandbox.probe import PRIVILEGED, bait

    declared = provider.guarantees
    sandbox = await make(provider)
    work = Path((await value(sandbox, "import os; os.getcwd()") or "").strip("'"))
    host = os.getpid()
    with tempfile.TemporaryDirectory() as apart, bait(_near(work, Path(apart)) / "bait") as outside:
        seen = await value(sandbox, outside.script())
        touched, reached = outside.touched(), outside.reached()
    environ = await value(sandbox, f"attempt(lambda: open('/proc/{host}/environ', 'rb').read())")
    passwd = await value(sandbox, "attempt(lambda: open('/etc/passwd').read())")
    theirs = repr(Path("/etc/passwd").read_text())
    unseen = {"'PermissionError'", "'FileNotFoundError'"}
    kept = touched is False and {seen, environ} <= unseen and passwd != theirs
    assert (declared.fs is Guarantee.ENFORCED) == kept, (seen, environ, passwd, touched)
    assert (declared.net is Guarantee.ENFORCED) == (not reached), reached
    refused = await value(sandbox, PRIVILEGED) == "0"
    assert (declared.kernel_surface is not Guarantee.ABSENT) == refused
    large = await sandbox.run_code("open('f', 'wb').write(bytes(2**21))", timeout=SECONDS)
    assert (declared.disk is not Guarantee.ABSENT) == (large.status is CallStatus.ERROR)
    await sandbox.kill()
