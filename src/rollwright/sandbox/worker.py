"""What runs inside a sandbox: a loop that answers requests for Python, SQL or programs.

Role: a persistent interpreter, a persistent database connection, or what starts programs, each in a process
of its own: agent Python can bend neither what SQL nor what programs answer. Neighbours: `zygote` and
`native.inside` fork it, `channel` sends it length-prefixed JSON. Invariants: standard library only; what it
answers is capped before it is encoded; a limit ends in a status, not in a crash. It is not trusted: the host
checks what it says.
"""

from __future__ import annotations

import _ast  # `ast` is large, and every sandbox carries it
import builtins
import contextlib
import io
import math
import os
import resource
import select
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rollwright.sandbox import lean

DATABASE = "data.db"
"""The database's file in the working folder."""
READY = b"ready"
"""What a worker sends once its walls are up."""

_MAX_ROWS = 1000
_DESCRIPTORS = 1 << 20
"""More than any process has."""
_READING_PRAGMAS = frozenset(
    (
        *("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo"),
        *("foreign_key_list", "foreign_key_check"),  # the latter is asked by iterdump from Python 3.13 on
    )
)

Reply = dict[str, Any]


class _Flood(BaseException):
    """More output than allowed; not an `Exception`, so that the code that prints doesn't catch it by the
    way."""


class _Capped(io.TextIOBase):
    """A text stream that takes `limit` characters and then refuses."""

    def __init__(self, limit: int) -> None:
        self._pieces: list[str] = []
        self._left = limit

    def write(self, text: str) -> int:
        """Take `text`, or what still fits of it."""
        self._pieces.append(text[: self._left])
        self._left -= len(text)
        if self._left < 0:
            self._left = 0
            raise _Flood
        return len(text)

    def writable(self) -> bool:
        return True

    def text(self) -> str:
        """What was written."""
        return "".join(self._pieces)


def _clean(text: str, limit: int) -> str:
    """At most `limit` characters, lone surrogates replaced: what every JSON reader takes."""
    return text[:limit].encode("utf-8", "replace").decode()


class Interpreter:
    """Runs Python; variables stay from call to call."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}

    def run(self, code: str, moved: str = "") -> Reply:
        """Execute `code`; `value` is the repr of its last expression. `moved` is the working folder, where
        another has been put in its place."""
        if moved:
            _follow(moved)
        out, err = _Capped(self._limit), _Capped(self._limit)
        status, value, exit_code = "ok", None, 0
        streams = sys.stdin, sys.stdout, sys.stderr
        sys.stdin, sys.stdout, sys.stderr = io.StringIO(), out, err
        try:
            value = self._execute(code)
            if value is not None and len(value) > self._limit:
                status = "output"
        except MemoryError:
            status, exit_code = "memory", 1
        except _Flood:
            status, exit_code = "output", 1
        except SystemExit as stop:
            exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            status = "error" if exit_code else "ok"
        except BaseException as error:  # boundary: whatever agent code raises is its observation
            status, exit_code = "error", 1
            inner = error.__traceback__.tb_next if error.__traceback__ else None
            with contextlib.suppress(_Flood):
                err.write("".join(traceback.format_exception(type(error), error, inner and inner.tb_next)))
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
        return {
            "status": status,
            "stdout": _clean(out.text(), self._limit),
            "stderr": _clean(err.text(), self._limit),
            "value": None if value is None else _clean(value, self._limit),
            "exit_code": exit_code,
        }

    def _execute(self, code: str) -> str | None:
        tree = compile(code, "<code>", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, _ast.Module)
        body = tree.body
        last = body.pop() if body and isinstance(body[-1], _ast.Expr) else None
        exec(compile(_ast.Module(body, []), "<code>", "exec", dont_inherit=True), self._names)
        if last is None:
            return None
        assert isinstance(last, _ast.Expr)
        value = eval(compile(_ast.Expression(last.value), "<code>", "eval", dont_inherit=True), self._names)
        return None if value is None else repr(value)


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    """No other database file, no extension, no setting."""
    refused = (
        action in (24, 25)  # SQLITE_ATTACH, SQLITE_DETACH; VACUUM INTO attaches too
        or (action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in _READING_PRAGMAS)
        or (
            action == sqlite3.SQLITE_FUNCTION
            and (second or "").lower() in ("load_extension", "fts3_tokenizer")
        )
    )
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


class Database:
    """One connection to the database of the sandbox it works for at the time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._connection: sqlite3.Connection | None = None

    def open(self, folder: str, script: str) -> Reply:
        """Leave the sandbox served before; serve the one in `folder`, its database made by the trusted
        `script`."""
        if self._connection is not None:
            self._connection.close()
        os.chdir(folder)
        # the file dies with the sandbox: it must survive a killed process, not a power cut
        pragmas = "PRAGMA synchronous=OFF; PRAGMA temp_store=MEMORY; PRAGMA journal_mode=OFF;"
        self._connection = connection = sqlite3.connect(DATABASE, isolation_level=None)
        connection.text_factory = _text
        if script and "BEGIN" not in script.upper():
            script = f"BEGIN;{script};COMMIT"
        try:
            connection.executescript(pragmas)
            connection.set_authorizer(_authorize)  # the script may be a copy of what an agent left
            connection.executescript(script)
            connection.set_authorizer(None)
            connection.execute("PRAGMA journal_mode=TRUNCATE").fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            return {"status": "error", "stderr": str(error)}
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 16 * self._limit)
        connection.set_authorizer(_authorize)
        return {"status": "ok"}

    def close(self) -> Reply:
        """Let go of the file; the next statement opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return {"status": "ok"}

    def run(self, query: str, parameters: Sequence[Any], timeout: float) -> Reply:
        """One statement; stopped from inside at `timeout`, so that the file stays whole."""
        deadline = time.monotonic() + timeout
        try:
            connection = self._connection
            assert connection is not None, "`open` comes first"
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 20_000)
            cursor = connection.execute(query, parameters)
            try:
                return self._rows(cursor)
            finally:
                cursor.close()
                connection.set_progress_handler(None, 0)  # the deadline was this statement's only
        except MemoryError:
            return {"status": "memory"}
        except Exception as error:  # boundary: a wrong statement is the agent's observation
            stopped = isinstance(error, sqlite3.OperationalError) and str(error) == "interrupted"
            return {
                "status": "timeout" if stopped else "error",
                "stderr": _clean(str(error) or type(error).__name__, self._limit),
            }

    def _rows(self, cursor: sqlite3.Cursor) -> Reply:
        if cursor.description is None:
            return {"status": "ok"}
        columns = [_clean(each[0], 200) for each in cursor.description]
        rows: list[list[Any]] = []
        left, status = self._limit, "ok"
        for row in cursor:
            cells = [_cell(cell) for cell in row]
            left -= sum(len(cell) if isinstance(cell, str) else 8 for cell in cells)
            if left < 0 or len(rows) == _MAX_ROWS:
                status = "output"
                break
            rows.append(cells)
        return {"status": status, "columns": columns, "rows": rows}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _cell(value: Any) -> Any:
    """A cell as JSON: blobs as hex, infinities as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def execute(argv: Sequence[str], stdin: str, timeout: float, limit: int, moved: str = "") -> Reply:
    """Run a program to its end, its deadline or its output limit; `moved` as in `Interpreter.run`."""
    if moved:
        _follow(moved)
    deadline = time.monotonic() + timeout
    source = os.memfd_create("stdin")
    with open(source, "wb", closefd=False) as file:
        file.write(stdin.encode("utf-8", "replace"))
    os.lseek(source, 0, os.SEEK_SET)
    ends = [os.pipe(), os.pipe()]
    actions = [(os.POSIX_SPAWN_DUP2, source, 0)]
    actions += [(os.POSIX_SPAWN_DUP2, write, number) for number, (_, write) in enumerate(ends, 1)]
    try:
        pid = os.posix_spawnp(argv[0], list(argv), os.environ, file_actions=actions)
    except (OSError, ValueError, IndexError) as error:
        for read, _ in ends:
            os.close(read)
        return {
            "status": "error",
            "stderr": _clean(f"{type(error).__name__}: {error}", limit),
            "exit_code": 127,
        }
    finally:
        for descriptor in (source, ends[0][1], ends[1][1]):
            os.close(descriptor)
    streams = {ends[0][0]: bytearray(), ends[1][0]: bytearray()}
    ended = os.pidfd_open(pid)
    status = _collect(streams, ended, deadline, limit)
    if status != "ok":
        os.kill(pid, 9)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for descriptor in (ended, *streams):
        os.close(descriptor)
    out, err = (_clean(data.decode("utf-8", "replace"), limit) for data in streams.values())
    if status == "ok" and exit_code:
        status = "error"
    return {"status": status, "stdout": out, "stderr": err, "exit_code": exit_code}


def _collect(streams: dict[int, bytearray], ended: int, deadline: float, limit: int) -> str:
    """Read until the program has ended and its pipes are drained; what it left behind may keep them open."""
    poll = select.poll()
    for descriptor in (ended, *streams):
        poll.register(descriptor, select.POLLIN)
    for descriptor in streams:
        os.set_blocking(descriptor, False)
    finished = False
    while True:
        ready = poll.poll(0 if finished else max(0.0, deadline - time.monotonic()) * 1000)
        for descriptor, _ in ready:
            if descriptor == ended:
                finished = True
                poll.unregister(ended)
            elif data := os.read(descriptor, 1 << 16):
                streams[descriptor] += data
            else:
                poll.unregister(descriptor)
        if any(len(data) > limit for data in streams.values()):
            return "output"
        if finished and not ready:
            return "ok"
        if time.monotonic() > deadline and not finished:
            return "timeout"


def _follow(folder: str) -> None:
    """Go to where the working folder is now, and below it to where this process was. Its live forks count as
    processes too."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    try:
        below = os.readlink("/proc/self/cwd").lstrip("/")
        os.chdir(os.path.join(folder, below))
    except OSError:
        os.chdir(folder)


def inherit(environment: dict[str, str]) -> None:
    """Have this environment and no more."""
    os.environ.clear()
    os.environ.update(environment)


def keep_only(null: int, descriptor: int) -> int:
    """Close every descriptor but `null`, which becomes the standard ones, and `descriptor`, the line to the
    host, which becomes 3; gives that."""
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if descriptor == 3:
        os.set_inheritable(3, False)
    else:
        os.dup2(descriptor, 3, inheritable=False)
    os.closerange(4, _DESCRIPTORS)
    return 3


def _receive(line: int, size: int) -> bytes:
    data = os.read(line, size)
    while len(data) < size:
        piece = os.read(line, size - len(data))
        if not piece:
            os._exit(0)  # the host is gone
        data += piece
    return data


def _send(line: int, data: bytes) -> None:
    while data:
        data = data[os.write(line, data) :]


def serve(line: int, kind: str, limit: int, more: dict[str, Callable[..., Reply]] | None = None) -> None:
    """Say that the walls are up; answer requests of one `kind`, and `more`, until the host closes its end of
    the stream socket `line`. `limit` is what one call may print, in characters."""
    operations: dict[str, Callable[..., Reply]]
    if kind == "interpreter":
        # what the code forks does not hold the line: the host sees at once when this process is gone
        os.register_at_fork(after_in_child=lambda: os.close(line))
        operations = {"python": Interpreter(limit).run}
    elif kind == "database":
        database = Database(limit)
        operations = {"sql": database.run, "open": database.open, "close": database.close}
    else:
        operations = {"exec": lambda **arguments: execute(limit=limit, **arguments)}
    operations |= more or {}
    pid = os.getpid()
    _send(line, READY)
    while True:
        request = lean.loads(_receive(line, int.from_bytes(_receive(line, 4), "big")))
        number, operation = request.pop("n"), request.pop("op")
        try:
            reply = operations[operation](**request)
        except MemoryError:
            reply = {"status": "memory"}
        except OSError as error:
            reply = {"status": "error", "stderr": f"{type(error).__name__}: {error}"}
        if os.getpid() != pid and reply["status"] == "branched":  # as it was meant to: serves on its own
            pid = os.getpid()
            _send(line, READY)
            continue
        if os.getpid() != pid:
            os._exit(0)  # a child that the code forked and let run on: it must not answer
        reply["n"] = number
        body = lean.dumps(reply)
        _send(line, len(body).to_bytes(4, "big") + body)
