"""What only the native backend has: layers, networks, a user of its own, memory counted together."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Guarantee, Limits, State
from rollwright.sandbox.native.layers import DEEPEST
from rollwright.sandbox.native.provider import NativeProvider
from rollwright.sandbox.probe import marked
from rollwright.types import CallStatus, Environment

pytestmark = pytest.mark.needs("namespaces")

SMALL = Limits(memory_bytes=256 * 2**20, disk_bytes=64 * 2**20, file_bytes=32 * 2**20)
SECONDS = 20.0


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[NativeProvider]:
    made = NativeProvider(tmp_path / "sandboxes", limits=SMALL)
    await made.start()
    yield made
    assert made.live == 0
    await made.close()
    assert (tmp_path / "sandboxes" / "zygote.log").read_text() == ""


async def test_a_snapshot_stays_as_it_was_while_a_program_goes_on_writing(provider: NativeProvider) -> None:
    sandbox = await provider.create(owner="x")
    await sandbox.run_code("file = open('log', 'w', buffering=1); file.write('one\\n')", timeout=SECONDS)
    snapshot = await sandbox.snapshot()
    await sandbox.run_code("file.write('two\\n')", timeout=SECONDS)
    assert await sandbox.files.read("log") == b"one\ntwo\n"
    other = await provider.create(owner="y", snapshot=snapshot)
    assert await other.files.read("log") == b"one\n"
    await snapshot.drop()
    await sandbox.kill()
    assert await other.files.read("log") == b"one\n"  # needs the first one's files
    await other.kill()


async def test_links_deletions_and_modes_go_from_layer_to_layer(provider: NativeProvider) -> None:
    sandbox = await provider.create(owner="x")
    made = "mkdir d; echo a > d/a; echo b > d/b; ln -s d/a link; echo 'echo ran' > p; chmod +x p"
    await sandbox.exec(made, timeout=SECONDS)
    for _ in range(3):
        await (await sandbox.snapshot()).drop()
        await sandbox.exec("rm -r d; mkdir d; echo new >> d/a", timeout=SECONDS)
    (fork,) = await sandbox.fork()
    shown = await fork.exec("ls d; cat link; ./p", timeout=SECONDS)
    assert shown.stdout == "a\nnew\nran\n", shown
    await fork.kill()
    await sandbox.kill()


async def test_many_snapshots_do_not_pile_up_layers(provider: NativeProvider) -> None:
    sandbox = await provider.create(owner="x")
    kept = []
    for number in range(2 * DEEPEST + 3):
        await sandbox.files.write(f"f{number}", str(number).encode())
        kept.append(await sandbox.snapshot())
    for number in (0, DEEPEST, 2 * DEEPEST + 2):
        await sandbox.restore(kept[number])
        assert len(await sandbox.files.list()) == number + 1
        assert await sandbox.files.read(f"f{number}") == str(number).encode()
    for each in kept:
        await each.drop()
    await sandbox.kill()


async def test_a_snapshot_there_is_no_room_for_costs_nothing(provider: NativeProvider) -> None:
    sandbox = await provider.create(owner="x")
    await sandbox.files.write("large", bytes(30 * 2**20))
    await sandbox.files.write("more", bytes(10 * 2**20))
    await sandbox.run_code("file = open('log', 'w', buffering=1)", timeout=SECONDS)
    with pytest.raises(SandboxError, match="copied"):  # somebody writes, so it would be a copy
        await sandbox.snapshot()
    await sandbox.run_code("file.write('on'); file.close()", timeout=SECONDS)
    for number in range(DEEPEST):
        await sandbox.files.write(f"f{number}", b"")
        await (await sandbox.snapshot()).drop()
    await sandbox.files.write("last", b"")
    with pytest.raises(SandboxError, match="copied"):  # too deep, so again
        await sandbox.snapshot()
    await sandbox.files.write("after", bytes(15 * 2**20))  # still writable, and nothing of the copies stays
    assert await sandbox.files.read("log") == b"on"
    await sandbox.kill()


async def test_a_snapshot_of_a_fork_is_restored_in_its_parent(provider: NativeProvider) -> None:
    sandbox = await provider.create(Environment(sql="CREATE TABLE t(a)"), owner="x")
    (fork,) = await sandbox.fork()
    await fork.sql("INSERT INTO t VALUES (7)", timeout=SECONDS)
    snapshot = await fork.snapshot()
    await fork.kill()
    await sandbox.restore(snapshot)
    found = await sandbox.sql("SELECT a FROM t", timeout=SECONDS)
    assert found.rows is not None and found.rows.rows == ((7,),)
    await snapshot.drop()
    with pytest.raises(SandboxError, match="dropped"):
        await sandbox.restore(snapshot)
    await sandbox.kill()


SERVE = """
import http.server, threading, urllib.request
server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib.request.urlopen(f'http://127.0.0.1:{server.server_port}', timeout=5).status
"""


async def test_only_a_network_asked_for_by_name_is_there(provider: NativeProvider) -> None:
    closed = await provider.create(owner="x")
    assert (await closed.run_code(SERVE, timeout=SECONDS)).status is CallStatus.ERROR
    open_ = await provider.create(owner="x", network="loopback")
    assert (await open_.run_code(SERVE, timeout=SECONDS)).value == "200"
    assert open_.info().network == "loopback"
    with pytest.raises(SandboxError, match="grants none, loopback"):
        await provider.create(owner="x", network="host")
    await closed.kill()
    await open_.kill()


async def test_the_hosts_network_is_granted_by_the_configuration_alone(tmp_path: Path) -> None:
    provider = NativeProvider(tmp_path / "sandboxes", limits=SMALL, networks=("host",))
    await provider.start()
    sandbox = await provider.create(owner="x", network="host")
    assert sandbox.guarantees.net is Guarantee.ABSENT
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    reached = await sandbox.run_code(
        f"import socket; socket.create_connection(('127.0.0.1', {port}), 5).recv(1)", timeout=SECONDS
    )
    assert reached.value == "b''"
    listener.close()
    await sandbox.kill()
    await provider.close()


async def test_memory_of_all_processes_together_ends_in_its_status(provider: NativeProvider) -> None:
    if provider.guarantees.memory is not Guarantee.ENFORCED:
        pytest.skip("this process may make no memory cgroup")
    sandbox = await provider.create(owner="x")
    code = "import os, time\nfor _ in range(2):\n if os.fork() == 0:\n  held = bytearray(90 * 2**20)\n"
    code += "  time.sleep(60)"
    await sandbox.run_code(code, timeout=SECONDS)
    shown = await sandbox.run_code("held = bytearray(200 * 2**20)", timeout=SECONDS)
    assert shown.status in (CallStatus.OK, CallStatus.MEMORY), shown  # whom the kernel takes is its choice
    assert (await sandbox.run_code("1", timeout=SECONDS)).value == "1"
    await sandbox.kill()
    again = await provider.create(owner="y")  # in the same group: what was killed there is not its doing
    assert (await again.exec(["sh", "-c", "kill -9 $$"], timeout=SECONDS)).status is CallStatus.ERROR
    await again.kill()


async def test_pid_1_that_dies_loses_the_sandbox_and_no_other(provider: NativeProvider) -> None:
    first, second = await provider.create(owner="x"), await provider.create(owner="y")
    mark = f"rw-{first.id[:12]}"
    await first.run_code(
        f"import ctypes; ctypes.CDLL(None).prctl(15, {mark!r}.encode(), 0, 0, 0)", timeout=SECONDS
    )
    (interpreter,) = marked(mark)
    status = Path(f"/proc/{interpreter}/status").read_text()
    parent = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    os.kill(parent, 9)
    with pytest.raises(SandboxLost):
        while True:
            await first.run_code("1", timeout=SECONDS)
    async with asyncio.timeout(SECONDS):
        while marked(mark):  # noqa: ASYNC110 - the kernel empties the namespace in its own time
            await asyncio.sleep(0.01)
    assert first.info().state is State.KILLED
    assert (await second.run_code("1", timeout=SECONDS)).value == "1"
    await first.kill()
    await second.kill()


LOOK = """
import os
def attempt(path, mode):
    try:
        return open(path, mode).read(1)
    except OSError as error:
        return type(error).__name__
others = [name for name in os.listdir('/proc') if name.isdecimal() and name != str(os.getpid())]
names = (('mem', 'r+b'), ('environ', 'rb'), ('fd/3', 'rb'))
len(others), {attempt(f'/proc/{pid}/{name}', mode) for pid in others for name, mode in names}
"""


async def test_agents_look_into_nothing_that_answers_for_the_host(provider: NativeProvider) -> None:
    sandbox = await provider.create(Environment(sql="CREATE TABLE t(a)"), owner="x")
    await sandbox.exec(["true"], timeout=SECONDS)
    found = await sandbox.run_code(LOOK, timeout=SECONDS)
    assert found.value == "(3, {'PermissionError'})", found  # pid 1, the database, what starts programs
    await sandbox.kill()


ORDINARY = """
import asyncio, sys
from pathlib import Path
from rollwright.sandbox.native.provider import NativeProvider
async def main():
    provider = NativeProvider(Path(sys.argv[1]))
    await provider.start()
    sandbox = await provider.create(owner="x")
    await sandbox.exec("echo hi > a", timeout=20)
    (fork,) = await sandbox.fork()
    print((await fork.run_code("print(open('a').read(), end='')", timeout=20)).stdout, end="")
    print(provider.guarantees.missing(("fs", "net", "kill", "pids", "disk")))
    await provider.close()
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="run as an ordinary user already: the other tests are this one")
def test_an_ordinary_user_gets_the_same(tmp_path: Path) -> None:
    """Another user runs it, with a Python and a copy of the package that it can read."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    assert python is not None, "no Python that another user can read"
    version = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    told = subprocess.run(version, capture_output=True, text=True, check=True).stdout
    if told.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("the system's Python is of another version than the packages here")
    room = Path("/tmp") / f"rollwright-ordinary-{os.getpid()}"
    source = Path(__file__).parents[3] / "src"
    try:
        shutil.copytree(source, room / "src")
        packages = Path(msgspec.__file__).parents[1]
        for name in ("msgspec", "numpy", "numpy.libs"):
            shutil.copytree(packages / name, room / "src" / name)
        (room / "work").mkdir()
        os.chown(room / "work", 65534, 65534)
        for path in (room, *room.rglob("*")):
            os.chmod(path, 0o755)
        ran = subprocess.run(
            [python, "-c", ORDINARY, str(room / "work")],
            env={"PYTHONPATH": str(room / "src"), "PATH": os.environ["PATH"]},
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ran.stdout, ran.returncode) == ("hi\n[]\n", 0), ran.stderr
    finally:
        shutil.rmtree(room)
