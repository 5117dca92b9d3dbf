"""What every sandbox backend must do between `create` and `kill`: files, snapshots, forks, pauses, timeouts.

Role: the second half of the conformance suite of `SandboxProvider`; `sandboxes` has calls, limits and walls.
Neighbours: our tests run it over each backend, a plug-in's tests can too. Invariant: nothing here asks for a
program or a wall, so that a fake without either conforms.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

from rollwright.errors import SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import GuaranteeName, Limits, Sandbox, SandboxProvider, State
from rollwright.types import CallStatus, Environment, File, Json

Check = Callable[[SandboxProvider], Awaitable[None]]
CHECKS: list[Check] = []
"""Each takes a started provider and raises `AssertionError` where it does not conform."""

SECONDS = 20.0
"""Deadline of calls that should end by themselves."""
START = Environment(
    sql="CREATE TABLE t(a); INSERT INTO t VALUES (1)", files=(File(path="in/a.txt", text="ä"),)
)


def check(function: Check) -> Check:
    """Add to the suite."""
    CHECKS.append(function)
    return function


async def make(provider: SandboxProvider) -> Sandbox:
    """A sandbox that begins with `START`."""
    return await provider.create(START, owner="conformance")


async def rows(sandbox: Sandbox) -> list[Json]:
    """The first column of its table."""
    found = await sandbox.sql("SELECT a FROM t ORDER BY a", timeout=SECONDS)
    assert found.rows is not None, found
    return [row[0] for row in found.rows.rows]


async def names(sandbox: Sandbox, path: str = "") -> list[str]:
    """Its files without the database's."""
    return [name for name in await sandbox.files.list(path) if not name.startswith("data.db")]


async def refused(work: Awaitable[object], *kinds: type[Exception]) -> Exception:
    """The error of `kinds` that the work raises."""
    try:
        given = await work
    except kinds as error:
        return error
    raise AssertionError(f"expected one of {kinds}, got {given!r}")


def linked(name: str, to: str) -> tarfile.TarInfo:
    """A symbolic link as a member of an archive."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname = tarfile.SYMTYPE, to
    return made


async def change(sandbox: Sandbox) -> None:
    """Make it differ from `START`."""
    await sandbox.sql("INSERT INTO t VALUES (2)", timeout=SECONDS)
    await sandbox.files.write("in/a.txt", b"changed")
    await sandbox.files.write("new.bin", bytes([255, 0]))
    await sandbox.run_code("x = 5", timeout=SECONDS)


async def is_start(sandbox: Sandbox) -> None:
    """It holds `START` and no variables."""
    assert await rows(sandbox) == [1]
    assert await names(sandbox) == ["in/a.txt"]
    assert await sandbox.files.read("in/a.txt") == "ä".encode()
    assert (await sandbox.run_code("x", timeout=SECONDS)).status is CallStatus.ERROR


@check
async def files_come_and_go(provider: SandboxProvider) -> None:
    """Read, write, list, remove, upload, download; what is not there or not inside is an error of its
    kind."""
    from rollwright.sandbox import archive

    sandbox = await make(provider)
    files = sandbox.files
    await files.write("b/c/d", b"1")
    await files.write("b/c/d", b"22")
    assert await names(sandbox) == ["b/c/d", "in/a.txt"]
    assert await files.list("b") == await files.list("./b//c/") == ["b/c/d"]
    made = await files.download("b")
    assert made == await files.download("b") == archive.pack([("c/d", b"22")])
    await files.upload(made, "copy/of")
    assert await files.read("copy/of/c/d") == b"22"
    await files.remove("b")
    await files.remove("copy/of/c/d")
    assert await names(sandbox) == ["in/a.txt"]
    for path in ("..", "/etc", "in/../..", "\0"):
        for action in (files.list(path), files.remove(path), files.download(path), files.upload(made, path)):
            await refused(action, PermissionError)
    await refused(files.remove(""), PermissionError)
    await refused(files.list("in/a.txt"), PermissionError)
    for missing in (files.read("nothing"), files.list("nothing"), files.remove("nothing")):
        await refused(missing, FileNotFoundError)
    for bad in (tarfile.TarInfo("../secret"), linked("secret", "/etc/passwd"), linked("secret", "..")):
        hostile = archive.pack([("good", b"1")])[:-1024] + bad.tobuf() + bytes(1024)
        await refused(files.upload(hostile), PermissionError)
    await refused(files.upload(b"no archive" * 100), OSError)
    await refused(files.write("n" * 300, b""), OSError)
    await refused(files.write("large", bytes(sandbox.limits.file_bytes + 1)), OSError)
    assert await names(sandbox) == ["in/a.txt"]
    await sandbox.kill()


@check
async def a_snapshot_is_immutable_and_restored(provider: SandboxProvider) -> None:
    """Whatever happens to its sandbox; restoring twice is the same, and variables go."""
    sandbox = await make(provider)
    first = await sandbox.snapshot()
    await change(sandbox)
    second = await sandbox.snapshot()
    assert first.id != second.id
    for _ in range(2):
        await sandbox.restore(first)
        await is_start(sandbox)
        await change(sandbox)
    await sandbox.restore(second)
    assert await rows(sandbox) == [1, 2] and await names(sandbox) == ["in/a.txt", "new.bin"]
    await sandbox.restore(first)
    await sandbox.kill()
    late = await provider.create(owner="conformance", snapshot=first)
    await is_start(late)
    await first.drop()
    await first.drop()
    await is_start(late)  # goes on without it
    await second.drop()
    await late.kill()


@check
async def a_saved_snapshot_is_named_by_its_content(provider: SandboxProvider) -> None:
    """The same content is the same file, another provider's too; one that was changed is refused."""
    sandbox, other = await make(provider), await make(provider)
    with tempfile.TemporaryDirectory() as folder:
        kept = await (await sandbox.snapshot()).save(Path(folder) / "made")
        assert kept == await (await sandbox.snapshot()).save(kept.parent)
        await change(other)
        changed = await (await other.snapshot()).save(kept.parent)
        assert changed != kept and len(list(kept.parent.iterdir())) == 2
        loaded = await provider.load(kept)
        fresh = await provider.create(owner="conformance", snapshot=loaded)
        await is_start(fresh)
        await other.restore(loaded)
        await is_start(other)
        changed.write_bytes(kept.read_bytes())
        await refused(provider.load(changed), SandboxError)
        await refused(provider.load(kept.with_name("nothing.tar")), SandboxError)
        await loaded.drop()
    for each in (sandbox, other, fresh):
        await each.kill()


@check
async def forks_go_ways_of_their_own(provider: SandboxProvider) -> None:
    """Several at once, of a fork too; the first one's end ends none."""
    sandbox = await make(provider)
    branches = await sandbox.fork(3)
    assert len({sandbox.id, *(branch.id for branch in branches)}) == 4
    for branch in branches:
        told = branch.info()
        assert (told.parent, told.forked, told.owner) == (sandbox.id, "filesystem", "conformance")
        await is_start(branch)
    await change(branches[0])
    await sandbox.kill()
    (leaf,) = await branches[0].fork()
    assert await rows(leaf) == [1, 2] and leaf.info().parent == branches[0].id
    for branch in branches[1:]:
        await is_start(branch)
    for each in (*branches, leaf):
        await each.kill()


@check
async def a_live_fork_keeps_variables_or_is_refused(provider: SandboxProvider) -> None:
    """A mode that has none says which has."""
    sandbox = await make(provider)
    await change(sandbox)
    try:
        (branch,) = await sandbox.fork(live=True)
    except SandboxError as error:
        assert "live" in str(error)
    else:
        assert branch.info().forked == "live"
        assert (await branch.run_code("x", timeout=SECONDS)).value == "5"
        await branch.run_code("x = 6", timeout=SECONDS)
        assert (await sandbox.run_code("x", timeout=SECONDS)).value == "5"
        assert await rows(branch) == [1, 2]
        await branch.kill()
    await sandbox.kill()


@check
async def a_paused_sandbox_waits(provider: SandboxProvider) -> None:
    """Its call goes on after `resume`, and ends at its deadline where that comes first; both twice."""
    sandbox = await make(provider)
    await sandbox.pause()
    await sandbox.pause()
    assert sandbox.info().state is State.PAUSED
    call = asyncio.create_task(sandbox.run_code("1 + 1", timeout=SECONDS))
    await asyncio.sleep(0.05)
    assert not call.done(), call
    await sandbox.resume()
    await sandbox.resume()
    assert (await call).value == "2" and sandbox.info().state is State.RUNNING
    await sandbox.pause()
    assert (await sandbox.run_code("1", timeout=0.1)).status is CallStatus.TIMEOUT
    await sandbox.resume()
    assert await rows(sandbox) == [1]
    await sandbox.pause()
    await sandbox.kill()


@check
async def its_time_ends_it(provider: SandboxProvider) -> None:
    """By `set_timeout` and by the limit of wall seconds; what is set later replaces what was set before."""
    stays, ends = await make(provider), await make(provider)
    short = Limits(wall_seconds=1.0)
    limited = await provider.create(owner="conformance", limits=short)
    extended = await provider.create(owner="conformance", limits=short)
    await extended.set_timeout(None)
    await stays.set_timeout(1.0)
    await stays.set_timeout(600.0)
    await ends.set_timeout(0.2)
    for sandbox in (ends, limited):
        async with asyncio.timeout(SECONDS):
            while sandbox.info().state is not State.KILLED:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        await refused(sandbox.sql("SELECT 1", timeout=1), SandboxLost)
        await refused(provider.connect(sandbox.id), SandboxLost)
    await asyncio.sleep(0.5)
    assert await rows(stays) == [1]
    assert (await extended.sql("SELECT 1", timeout=SECONDS)).status is CallStatus.OK
    await stays.kill()
    await extended.kill()


@check
async def it_says_what_it_is(provider: SandboxProvider) -> None:
    """`info`, `connect`, `live`; after `kill` it is lost to every method."""
    before = provider.live
    limits = Limits(processes=9)
    sandbox = await provider.create(owner="somebody", limits=limits)
    told = sandbox.info()
    assert (told.id, told.owner, told.limits, told.network) == (sandbox.id, "somebody", limits, "none")
    assert (told.state, told.parent, told.forked) == (State.RUNNING, None, None)
    assert told.guarantees == sandbox.guarantees and told.backend
    assert (await provider.connect(sandbox.id)).id == sandbox.id
    assert provider.live == before + 1 <= provider.capacity
    snapshot = await sandbox.snapshot()
    await sandbox.kill()
    await sandbox.kill()
    assert provider.live == before and sandbox.info().state is State.KILLED
    for call in (
        sandbox.exec("true", timeout=1),
        sandbox.run_code("1", timeout=1),
        sandbox.files.write("a", b""),
        sandbox.files.list(),
        sandbox.snapshot(),
        sandbox.restore(snapshot),
        sandbox.fork(),
        sandbox.pause(),
        sandbox.set_timeout(1.0),
        provider.connect(sandbox.id),
    ):
        await refused(call, SandboxLost)
    await snapshot.drop()


@check
async def what_it_cannot_give_is_refused(provider: SandboxProvider) -> None:
    """A guarantee that is not enforced, by name; a network that nobody granted; both kinds of beginning."""
    for name in get_args(GuaranteeName):
        if missing := provider.guarantees.missing([name]):
            error = await refused(provider.create(owner="conformance", require=[name]), SandboxUnavailable)
            assert all(each in str(error) for each in missing)
        else:
            await (await provider.create(owner="conformance", require=[name])).kill()
    await refused(provider.create(owner="conformance", network="moon"), SandboxError)
    sandbox = await make(provider)
    snapshot = await sandbox.snapshot()
    await sandbox.kill()
    await refused(
        provider.create(START, owner="conformance", snapshot=snapshot), SandboxError, TypeError, ValueError
    )
    await snapshot.drop()
