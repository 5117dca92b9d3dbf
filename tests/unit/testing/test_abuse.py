"""The verdict of the abuse suite: what is claimed and not kept, and what is kept and not claimed."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import SandboxLost
from rollwright.sandbox.base import Guarantee, GuaranteeName, Guarantees, SandboxProvider
from rollwright.testing.abuse import PROBES, Finding, Observation, assert_declared, judge, observe
from rollwright.testing.memory_sandboxes import MemorySandboxes
from rollwright.testing.probes import bait

NAMES = get_args(GuaranteeName)
ALL = Guarantees(**dict.fromkeys(NAMES, Guarantee.ENFORCED))
levels = st.fixed_dictionaries({name: st.sampled_from(Guarantee) for name in NAMES})
findings = st.lists(
    st.builds(Finding, st.just("attempt"), st.builds(Observation, st.sampled_from(NAMES), st.booleans()))
)


@given(levels, findings)
def test_what_is_stopped_decides(declared: dict[str, Guarantee], found: list[Finding]) -> None:
    mismatches = judge(found, Guarantees(**declared))
    for name in NAMES:
        tried = [each.observation.stopped for each in found if each.observation.guarantee == name]
        weaker = any(each.weaker for each in mismatches if each.guarantee == name)
        stronger = any(not each.weaker for each in mismatches if each.guarantee == name)
        level = declared[name]
        some_through, none_stopped = not all(tried), bool(tried) and not any(tried)
        assert weaker == (
            some_through if level is Guarantee.ENFORCED else none_stopped and level is Guarantee.BEST_EFFORT
        )
        assert stronger == (level is Guarantee.ABSENT and bool(tried) and all(tried))


@given(levels)
def test_what_no_backend_may_let_through_needs_no_declaration(declared: dict[str, Guarantee]) -> None:
    for stopped in (True, False):
        found = [Finding("archive", Observation("always", stopped))]
        assert [each.weaker for each in judge(found, Guarantees(**declared))] == [True] * (not stopped)


@pytest.mark.parametrize(
    "error", [SandboxLost("gone"), OSError(5, "x"), AssertionError("no"), TimeoutError()]
)
async def test_a_probe_that_fails_was_not_stopped(error: Exception) -> None:
    async def breaks(_: SandboxProvider) -> Observation:
        raise error

    async def holds(_: SandboxProvider) -> Observation:
        return Observation("fs", True)

    provider = MemorySandboxes()
    found = await observe(provider, [breaks, holds])
    assert [(each.probe, each.observation.stopped) for each in found] == [("breaks", False), ("holds", True)]
    with pytest.raises(AssertionError, match="breaks got through"):
        await assert_declared(provider, [breaks, holds])


async def test_a_declared_guarantee_that_is_not_kept_is_named() -> None:
    async def leaks(_: SandboxProvider) -> Observation:
        return Observation("net", False, "reached: udp")

    mismatches = judge(await observe(MemorySandboxes(), [leaks]), ALL)
    assert [each.text for each in mismatches] == [
        "net is declared enforced, but leaks got through: reached: udp"
    ]
    assert not judge(
        await observe(MemorySandboxes(), [leaks]), msgspec.structs.replace(ALL, net=Guarantee.ABSENT)
    )


def test_no_two_probes_have_one_name() -> None:
    assert len({each.__name__ for each in PROBES}) == len(PROBES) > 50


def test_a_folder_shows_a_change() -> None:
    with bait.folder() as outside:
        assert not outside.changed()
        os.link(outside.file, outside.path.parent / f"{outside.path.name}-link")
        (outside.path.parent / f"{outside.path.name}-link").unlink()
        assert not outside.changed()
        outside.file.chmod(0o777)
        assert outside.changed()
    assert not outside.path.exists()


def test_a_process_shows_a_signal() -> None:
    with bait.sleeper() as process:
        assert process.attacked() == []
        os.kill(process.pid, signal.SIGTERM)
        assert process.attacked() == ["signalled"]
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_sockets_tell_which_of_them_was_reached() -> None:
    with bait.sockets() as outside:
        assert outside.reached() == []
        with socket.create_connection((outside.host("tcp"), outside.port("tcp"))):
            assert outside.reached() == ["tcp"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"!", outside.name("abstract-datagram"))
        assert outside.reached() == ["abstract-datagram"]


def test_a_process_is_found_by_an_argument() -> None:
    argument = "600.100200300400"
    assert bait.marked(argument) == []
    pid = os.posix_spawnp("sleep", ["sleep", argument], {})
    try:
        while not Path(f"/proc/{pid}/cmdline").read_bytes():  # the kernel lets us go on a moment earlier
            time.sleep(0.001)
        assert bait.marked(argument) == [pid]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
