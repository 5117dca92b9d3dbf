"""The process in a remote sandbox that keeps the interpreter and the database between calls.

Role: runs what the host asks in worker processes, with the call's deadline, and keeps the result until it
was fetched; touches files for the host. Neighbours: `ask` brings requests over a Unix socket, `worker` is
what the worker processes run, `files` and `archive` are the ones of the local backends. Invariants:
standard library only; one call runs at a time; a request's id has its effect once, however often it is
sent; a call that had to be cut costs the process that ran it, never the files.

It runs as the same user as the agent's code, which can kill it (the host starts it again; the variables are
gone) and, if it means to, answer in its place: the host checks what it says but cannot tell who said it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollwright.sandbox import worker
from rollwright.sandbox.archive import Bounds
from rollwright.sandbox.files import (
    empty_tree,
    list_beneath,
    pack_beneath,
    read_beneath,
    remove_beneath,
    unpack_beneath,
    write_beneath,
)
from rollwright.sandbox.remote.inside.ask import SOCKET, receive, send
from rollwright.sandbox.remote.inside.limits import adopt_orphans

WORK = "work"
"""The sandbox's working folder, beside the socket."""
_GRACE_SECONDS = 0.5
_START_SECONDS = 20.0
_SWEEPS = 50

Reply = dict[str, Any]


def _children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


def _text(said: str) -> str:
    """What every JSON reader takes."""
    return said[:2000].encode("utf-8", "replace").decode()


_KINDS = {"python": "interpreter", "exec": "programs", "sql": "database"}


class _Job:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply: Reply = {}


class _Worker:
    """A worker process and our end of its socket."""

    def __init__(self, folder: Path, settings: Reply) -> None:
        self._limit = max(32 * settings["output_bytes"], 2**20)  # JSON writes a character in up to six bytes
        self._requests = 0
        self._socket, theirs = socket.socketpair()
        path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        with theirs:
            command = [sys.executable, "-I", "-S", sys.path[0], "work", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, json.dumps(settings)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": path, "LANG": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)},
                start_new_session=True,
            )
        self._socket.settimeout(_START_SECONDS)
        if self._socket.recv(len(worker.READY), socket.MSG_WAITALL) != worker.READY:
            raise ValueError("said something before it was ready")

    def call(self, within: float, operation: str, arguments: Reply) -> Reply:
        """One request. Raises `TimeoutError`, or where it died or said what no worker says, `EOFError`,
        `OSError` or `ValueError`."""
        self._requests += 1
        self._socket.settimeout(max(within, 0.001))
        send(self._socket, json.dumps({"n": self._requests, "op": operation, **arguments}).encode())
        reply = json.loads(receive(self._socket, self._limit))
        if not isinstance(reply, dict) or reply.pop("n", None) != self._requests:
            raise ValueError("answered another request")
        return reply

    def end(self) -> int:
        """Kill it and its descendants; its exit code, negative for a signal."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self._socket.close()
        return self.process.wait()


class Helper:
    """Serves one sandbox."""

    def __init__(self, folder: Path, settings: Reply) -> None:
        self._folder, self._work, self._settings = folder, folder / WORK, settings
        self._file = settings["file_bytes"]
        self._bounds = Bounds(settings["disk_bytes"], settings["files"], self._file)
        self._whole = Bounds(settings["disk_bytes"], settings["files"], settings["disk_bytes"])
        self._turn, self._guard = threading.Lock(), threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._cut: set[str] = set()
        self._workers: dict[str, _Worker] = {}
        self._current = ""
        self._operations: dict[str, Callable[..., Reply | None]] = {
            "python": lambda code, timeout: self._ask("python", timeout, "python", code=code),
            "exec": lambda argv, stdin, timeout: self._ask(
                "exec", timeout + _GRACE_SECONDS, "exec", argv=argv, stdin=stdin, timeout=timeout
            ),
            "sql": self._sql,
            "open": self._open,
            "read": lambda path: {"data": read_beneath(self._work, path, self._file)},
            "write": lambda path, data: write_beneath(self._work, path, data, self._file),
            # names need not be text: bytes, with a zero between two
            "list": lambda path: {"data": os.fsencode("\0".join(list_beneath(self._work, path)))},
            "remove": lambda path: remove_beneath(self._work, path),
            "upload": lambda path, data: unpack_beneath(self._work, data, path, self._bounds),
            "download": lambda path: {"data": pack_beneath(self._work, path, self._bounds)},
            "pack": lambda: {"data": pack_beneath(self._work, "", self._whole)},
            "restore": self._restore,
        }

    def answer(self, request: Reply) -> Reply:
        """What to say to one request: `done` with a reply, or `pending` after `poll` seconds."""
        operation, number = request.pop("op"), request.pop("id", "")
        poll = request.pop("poll", 5.0)
        if operation == "ping":
            return {"state": "done", "reply": {"status": "ok"}}
        if operation in ("stop", "continue"):
            self._signal(signal.SIGSTOP if operation == "stop" else signal.SIGCONT)
            return {"state": "done", "reply": {"status": "ok"}}
        if operation == "end":
            self._signal(signal.SIGKILL)
            os._exit(0)
        if operation == "cut":
            self._cut_off(number)
            return {"state": "done", "reply": {"status": "ok"}}
        with self._guard:
            job = self._jobs.get(number)
            if job is None and operation == "wait":
                return {"state": "gone"}  # a helper before this one had it
            if job is None:
                self._jobs = {name: each for name, each in self._jobs.items() if not each.done.is_set()}
                job = self._jobs[number] = _Job()
                threading.Thread(
                    target=self._run, args=(job, number, operation, request), daemon=True
                ).start()
        if not job.done.wait(poll):
            return {"state": "pending"}
        return {"state": "done", "reply": job.reply}

    def _run(self, job: _Job, number: str, operation: str, arguments: Reply) -> None:
        with self._turn:
            try:
                with self._guard:
                    self._current = number
                    cut = number in self._cut
                job.reply = {"status": "lost"} if cut else self._act(operation, arguments)
            except MemoryError:
                job.reply = {"status": "memory"}
            except Exception as error:  # boundary: whatever it is, the host is told and waits no longer
                job.reply = {"status": "lost", "stderr": _text(f"{type(error).__name__}: {error}")}
            finally:
                with self._guard:
                    self._current = ""
                    cut = number in self._cut
                for kind in tuple(self._workers) if cut else ():
                    self._end(kind)  # killed, if the call had got that far
                job.done.set()

    def _act(self, operation: str, arguments: Reply) -> Reply:
        if "file" in arguments:
            path = self._folder / arguments.pop("file")
            arguments["data"] = path.read_bytes()
            path.unlink()
        elif "data" in arguments:
            arguments["data"] = base64.b64decode(arguments["data"])
        try:
            reply = self._operations[operation](**arguments) or {}
        except OSError as error:
            kind = "missing" if isinstance(error, FileNotFoundError) else "error"
            kind = "refused" if isinstance(error, PermissionError) else kind
            return {
                "status": "error",
                "kind": kind,
                "errno": error.errno,
                "stderr": _text(str(error.strerror)),
            }
        if "data" in reply:
            reply["data"] = base64.b64encode(reply["data"]).decode()
        return {"status": "ok", **reply}

    def _ask(self, kind: str, within: float, operation: str, **arguments: Any) -> Reply:
        began = time.monotonic()
        try:
            if kind not in self._workers:
                started = _Worker(self._work, self._settings | {"kind": _KINDS[kind]})
                with self._guard:  # from here on, `_cut_off` finds it
                    self._workers[kind] = started
                    if self._current in self._cut:
                        raise EOFError("the call was cut off")
            left = within - (time.monotonic() - began if kind == "python" else 0.0)
            return self._workers[kind].call(left, operation, arguments)
        except TimeoutError:
            self._end(kind)
            return {"status": "timeout"}
        except (EOFError, OSError, ValueError, KeyError) as error:
            return self._gone(self._end(kind), _text(str(error)))

    @staticmethod
    def _gone(code: int, why: str) -> Reply:
        """What a dead worker means: the agent's doing until shown otherwise."""
        if code == -signal.SIGXCPU:
            return {"status": "timeout", "stderr": "out of CPU time"}
        if code >= 0:
            return {"status": "error", "stderr": f"the interpreter exited with {code}", "exit_code": code}
        return {"status": "lost", "stderr": f"the interpreter died: {why}", "exit_code": code}

    def _sql(self, query: str, parameters: list[Any], timeout: float) -> Reply:
        if "sql" not in self._workers and (opened := self._open(""))["status"] != "ok":
            return opened
        grace = timeout + _GRACE_SECONDS
        return self._ask("sql", grace, "sql", query=query, parameters=parameters, timeout=timeout)

    def _open(self, script: str) -> Reply:
        return self._ask("sql", 30.0, "open", folder=str(self._work), script=script)

    def _restore(self, data: bytes) -> Reply:
        for kind in tuple(self._workers):
            self._end(kind)
        self._sweep()
        empty_tree(self._work)
        unpack_beneath(self._work, data, "", self._whole)
        return {}

    def _end(self, kind: str) -> int:
        with self._guard:
            ended = self._workers.pop(kind, None)
        code = 0 if ended is None else ended.end()
        if kind != "sql":
            self._sweep()
        return code

    def _sweep(self) -> None:
        """Kill what dead workers left behind."""
        for _ in range(_SWEEPS):
            with self._guard:
                live = {each.process.pid for each in self._workers.values()}
            orphans = set(_children(os.getpid())) - live
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(OSError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)

    def _cut_off(self, number: str) -> None:
        """End the call of that id, or see that it never begins."""
        with self._guard:
            self._cut.add(number)
            for each in self._workers.values() if self._current == number else ():
                with contextlib.suppress(OSError):
                    os.kill(each.process.pid, signal.SIGKILL)  # the call's thread sees it, and ends the rest

    def _signal(self, number: int) -> None:
        todo = _children(os.getpid())
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):
                os.kill(pid, number)
            todo += _children(pid)

    def serve(self, listener: socket.socket) -> None:
        """Answer for ever; the machine's end is this process's."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._connected, args=(connection,), daemon=True).start()

    def _connected(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            connection.settimeout(_START_SECONDS)
            request = json.loads(receive(connection, 2**30))
            connection.settimeout(None)
            send(connection, json.dumps(self.answer(request)).encode())


def start(folder: str, settings: str) -> str:
    """Leave a helper running in the background; the line to print, once it listens."""
    os.chdir(folder)
    here = Path.cwd()
    os.makedirs(WORK, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        _dismiss()
        os.unlink(SOCKET)
    sys.path[0] = str(here / Path(sys.path[0]).name)  # where its workers find the program, from any folder
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen(16)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        _become(here, listener, json.loads(base64.urlsafe_b64decode(settings)))
    os.wait()
    python = list(sys.version_info[:2])
    return json.dumps({"state": "ready", "python": python, "work": str(here / WORK)})


def _dismiss() -> None:
    """End the helper that may still listen."""
    with contextlib.suppress(ConnectionError, EOFError, TimeoutError), socket.socket(socket.AF_UNIX) as there:
        there.settimeout(2.0)
        there.connect(SOCKET)
        send(there, json.dumps({"op": "end"}).encode())
        receive(there, 64)


def _become(folder: Path, listener: socket.socket, settings: Reply) -> None:
    """In the background process: let go of the terminal that started it, then serve."""
    try:
        kept = listener.fileno()
        null, log = (
            os.open(os.devnull, os.O_RDWR),
            os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        )
        for standard, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, standard)
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        adopt_orphans()
        Helper(folder, settings).serve(listener)
    finally:
        os._exit(70)
