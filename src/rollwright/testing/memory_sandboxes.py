"""Sandboxes in this process, without any isolation, for tests of what stands around a sandbox.

Role: a fast fake of the sandbox seam. Neighbours: tests of agents, rewards and the factory. Invariant: it
answers like a real one (SQLite really runs, variables persist, errors are results), and `live` tells what
was not closed. Never give it code that is not the test's own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sqlite3
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rollwright.errors import SandboxLost
from rollwright.sandbox.base import Guarantee, Guarantees, Limits, Sandbox
from rollwright.types import CallStatus, Environment, ExecResult, File, Json, RowSet

NONE_KEPT = Guarantees(
    fs=Guarantee.ABSENT,
    net=Guarantee.ABSENT,
    pids=Guarantee.ABSENT,
    memory=Guarantee.ABSENT,
    disk=Guarantee.ABSENT,
    kill=Guarantee.ABSENT,
)


class MemorySandbox:
    """One environment; `lost` makes every further call raise `SandboxLost`."""

    def __init__(self, id: str, environment: Environment, closed: Callable[[MemorySandbox], None]) -> None:
        self.id = id
        self.lost = False
        self._closed = closed
        self._files = {file.path: file.text.encode() for file in environment.files}
        self._variables: dict[str, Any] = {}
        self._database = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._database.executescript(environment.sql)
        except sqlite3.Error:
            self._database.close()
            raise

    @property
    def guarantees(self) -> Guarantees:
        return NONE_KEPT

    def _check(self) -> None:
        if self.lost:
            raise SandboxLost(f"sandbox {self.id} is lost")

    async def exec(self, argv: Sequence[str], *, timeout: float, stdin: str = "") -> ExecResult:
        self._check()
        return ExecResult(status=CallStatus.ERROR, stderr="no programs here", exit_code=127)

    async def run_code(self, code: str, *, timeout: float) -> ExecResult:
        self._check()
        out, value = io.StringIO(), None
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(out):
                exec(compile(tree, "<call>", "exec"), self._variables)
                if isinstance(last, ast.Expr):
                    body = compile(ast.Expression(last.value), "<call>", "eval")
                    value = eval(body, self._variables)
        except Exception as error:  # boundary: the code's own failure is its result
            text = f"{type(error).__name__}: {error}"
            return ExecResult(status=CallStatus.ERROR, stdout=out.getvalue(), stderr=text)
        shown = None if value is None else repr(value)
        return ExecResult(status=CallStatus.OK, stdout=out.getvalue(), value=shown)

    async def sql(self, query: str, *, timeout: float, parameters: Sequence[Json] = ()) -> ExecResult:
        self._check()
        try:
            cursor = self._database.execute(query, tuple(parameters))
            rows = [tuple(row) for row in cursor.fetchall()]
        except (sqlite3.Error, sqlite3.Warning) as error:
            return ExecResult(status=CallStatus.ERROR, stderr=str(error))
        if cursor.description is None:
            return ExecResult(status=CallStatus.OK)
        columns = tuple(str(column[0]) for column in cursor.description)
        return ExecResult(status=CallStatus.OK, rows=RowSet(columns=columns, rows=tuple(rows)))

    async def read_file(self, path: str) -> bytes:
        self._check()
        if path.startswith("/") or ".." in path.split("/"):
            raise PermissionError(path)
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self._check()
        self._files[path] = data

    async def snapshot(self) -> Environment:
        self._check()
        files = tuple(File(path=path, text=data.decode()) for path, data in self._files.items())
        return Environment(files=files, sql="\n".join(self._database.iterdump()))

    async def fork(self) -> Sandbox:
        return MemorySandbox(f"{self.id}'", await self.snapshot(), self._closed)

    async def close(self) -> None:
        self._database.close()
        self._closed(self)


class MemorySandboxes:
    """Makes them. `fault` may raise for an owner, in place of making its sandbox."""

    def __init__(self, fault: Callable[[str], None] | None = None) -> None:
        self._fault = fault
        self.owners: list[str] = []
        """Every owner that asked, in order."""
        self.live: dict[str, MemorySandbox] = {}
        """Owner → its sandbox, while it is not closed."""

    async def start(self) -> None:
        return

    @property
    def guarantees(self) -> Guarantees:
        return NONE_KEPT

    @property
    def capacity(self) -> int:
        return sys.maxsize

    async def create(
        self, environment: Environment, *, owner: str, limits: Limits | None = None
    ) -> MemorySandbox:
        self.owners.append(owner)
        if self._fault is not None:
            self._fault(owner)
        self.live[owner] = MemorySandbox(owner, environment, self._forget)
        return self.live[owner]

    def _forget(self, sandbox: MemorySandbox) -> None:
        self.live = {owner: each for owner, each in self.live.items() if each is not sandbox}

    async def close(self) -> None:
        for sandbox in list(self.live.values()):
            await sandbox.close()
