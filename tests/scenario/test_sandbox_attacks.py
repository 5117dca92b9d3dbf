"""Attacks that once worked: from a confined interpreter against the host, its records and the grader."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from local_sandboxes import WALLED, built

from rollwright.errors import SandboxError
from rollwright.sandbox.base import Limits, Sandbox
from rollwright.types import CallStatus, Environment
from rollwright.wire import encode

FORGE = "import os, struct\nbody = {body!r}\nos.write(3, struct.pack('!I', len(body)) + body)"


@pytest.fixture(params=WALLED)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def box(
    backend: str, folder: Path, sql: str = "", limits: Limits | None = None
) -> AsyncIterator[Sandbox]:
    provider = built(backend, folder / "sandboxes", max_live=4)
    await provider.start()
    try:
        sandbox = await provider.create(Environment(sql=sql), owner="r", limits=limits)
        yield sandbox
        await sandbox.kill()
    finally:
        await provider.close()


async def test_limits_of_other_processes_are_out_of_reach(backend: str, tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # noqa: ASYNC220
    code = f"import resource; resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (0, 0))"
    try:
        async with box(backend, tmp_path) as sandbox:
            tried = await sandbox.run_code(code, timeout=5)
            own = await sandbox.run_code("resource.getrlimit(resource.RLIMIT_CPU)[0] > 0", timeout=5)
        assert tried.status is CallStatus.ERROR
        assert "PermissionError" in tried.stderr or "ProcessLookupError" in tried.stderr
        assert own.value == "True"
        await asyncio.sleep(1.2)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_modes_and_times_outside_stay_as_they_are(backend: str, tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("x")
    outside.chmod(0o600)
    before = outside.stat()
    code = f"import os; os.chmod({str(outside)!r}, 0o4777); os.utime({str(outside)!r}, (1, 1))"
    async with box(backend, tmp_path) as sandbox:
        await sandbox.run_code(code, timeout=5)
        await sandbox.run_code(f"os.setxattr({str(outside)!r}, 'user.a', b'1')", timeout=5)
    after = outside.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.parametrize("code", [0, 1, 70, 255])
async def test_an_exit_is_the_agents_doing_whatever_its_code(backend: str, tmp_path: Path, code: int) -> None:
    async with box(backend, tmp_path) as sandbox:
        ended = await sandbox.run_code(f"import os; os._exit({code})", timeout=5)
        assert ended.status is CallStatus.ERROR
        assert (await sandbox.run_code("1 + 1", timeout=5)).value == "2"


FORGED = {
    "huge integer": b'{"n":1,"status":"ok","exit_code":' + b"9" * 30 + b"}",
    "huge cell": b'{"n":1,"status":"ok","columns":["a"],"rows":[[' + b"9" * 30 + b"]]}",
    "deep cell": b'{"n":1,"status":"ok","columns":["a"],"rows":[[' + b"[" * 99_999 + b"]" * 99_999 + b"]]}",
    "a result set": b'{"n":1,"status":"ok","columns":["a"],"rows":[["1"]]}',
    "another status": b'{"n":1,"status":"denied"}',
    "lost": b'{"n":1,"status":"lost"}',
}


@pytest.mark.parametrize("body", FORGED.values(), ids=FORGED)
async def test_a_forged_reply_is_the_end_of_the_interpreter_and_no_more(
    backend: str, tmp_path: Path, body: bytes
) -> None:
    async with box(backend, tmp_path) as sandbox:
        result = await sandbox.run_code(FORGE.format(body=body), timeout=5)
        encode(result)
        assert result.rows is None and result.status is not CallStatus.OK
        assert (await sandbox.run_code("1 + 1", timeout=5)).value == "2"


async def test_a_program_does_not_inherit_the_line_to_the_host(backend: str, tmp_path: Path) -> None:
    async with box(backend, tmp_path) as sandbox:
        code = "import os; os.write(3, b'forged')"
        result = await sandbox.exec(["python3", "-I", "-S", "-c", code], timeout=10)
        assert result.exit_code != 0, result


async def test_output_beyond_the_limit_never_reaches_the_host(backend: str, tmp_path: Path) -> None:
    body = (
        "import os, struct, json\n"
        "body = json.dumps({'n': 1, 'status': 'ok', 'stdout': 'x' * 2**23}).encode()\n"
    )
    async with box(backend, tmp_path) as sandbox:
        result = await sandbox.run_code(
            body + "os.write(3, struct.pack('!I', len(body)))\nos.write(3, body)", timeout=5
        )
        assert len(result.stdout) <= sandbox.limits.output_bytes


async def test_a_snapshot_has_a_limit_on_all_files_together(tmp_path: Path) -> None:
    limits = Limits(file_bytes=2**20, disk_bytes=4 * 2**20)
    async with box("landlock", tmp_path, limits=limits) as sandbox:
        code = "for i in range(8):\n    with open(f'f{i}', 'wb') as f: f.truncate(2**20 - 1)"
        assert (await sandbox.run_code(code, timeout=5)).status is CallStatus.OK
        with pytest.raises(SandboxError, match=r"cannot be kept.*more than 4194304 bytes"):
            await sandbox.snapshot()


async def test_a_snapshot_is_not_cut_by_the_deadline_of_an_earlier_statement(
    backend: str, tmp_path: Path
) -> None:
    fill = (
        "INSERT INTO t WITH RECURSIVE c(x) AS "
        "(VALUES(1) UNION ALL SELECT x + 1 FROM c WHERE x < 20000) SELECT x FROM c"
    )
    async with box(backend, tmp_path, sql="CREATE TABLE t(a);") as sandbox:
        assert (await sandbox.sql(fill, timeout=1)).status is CallStatus.OK
        await asyncio.sleep(1.1)
        (fork,) = await sandbox.fork()
        for each in (sandbox, fork):
            counted = await each.sql("SELECT count(*), max(a) FROM t", timeout=5)
            assert counted.rows is not None and counted.rows.rows == ((20000, 20000),)
        await fork.kill()
