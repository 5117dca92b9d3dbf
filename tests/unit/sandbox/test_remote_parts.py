"""Labels, repeats and the uploaded program of remote sandboxes; no SDK."""

import ast
import re
import string
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import DeadlineExceeded, SandboxError, SandboxUnavailable
from rollwright.sandbox.remote import owner
from rollwright.sandbox.remote.adapter import Busy, Unreachable
from rollwright.sandbox.remote.bundle import bundle
from rollwright.sandbox.remote.patience import TRIES, asked
from rollwright.testing.clock import FakeClock

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@given(st.text(max_size=200), st.text(max_size=200))
def test_labels_fit_and_tell_owners_apart(one: str, other: str) -> None:
    """What Kubernetes takes as a label's value; two owners never have the same."""
    first, second = owner.labels(one), owner.labels(other)
    assert all(LABEL.fullmatch(value) for value in first.values()), first
    assert (first == second) == (one == other)


@given(st.text(alphabet=string.ascii_letters + string.digits, min_size=1, max_size=63))
def test_a_plain_owner_stays_readable(name: str) -> None:
    assert owner.labels(name)[owner.OWNER] == name


def test_only_a_dead_process_of_this_host_has_abandoned_its_own() -> None:
    mine = owner.labels("r")
    boot, pid, started = mine[owner.RUN].split("-")
    assert not owner.abandoned(mine)
    assert not owner.abandoned({})
    assert not owner.abandoned(mine | {owner.HOST: "another"})
    assert not owner.abandoned(mine | {owner.RUN: "no number"})
    assert owner.abandoned(mine | {owner.RUN: f"{boot}-{pid}-{int(started) + 1}"})
    assert owner.abandoned(mine | {owner.RUN: f"{'0' * 12}-{pid}-{started}"})


class Vendor:
    """Fails as told, then answers."""

    def __init__(self, clock: FakeClock, *failures: Exception) -> None:
        self._clock, self._failures = clock, list(failures)
        self.at: list[float] = []

    async def ask(self, timeout: float) -> str:
        self.at.append(self._clock.now())
        assert timeout > 0
        if self._failures:
            raise self._failures.pop(0)
        return "done"


async def test_it_asks_again_ever_later() -> None:
    clock = FakeClock()
    vendor = Vendor(clock, Busy("429"), Unreachable("broke"), Busy("503"))
    assert await asked(clock, "asking", vendor.ask) == "done"
    assert vendor.at == [0, 0.25, 0.75, 1.75]


async def test_a_vendor_that_stays_busy_is_unavailable() -> None:
    clock = FakeClock()
    vendor = Vendor(clock, *[Busy("429")] * 99)
    with pytest.raises(SandboxUnavailable, match="quota"):
        await asked(clock, "asking", vendor.ask, 300.0)
    assert len(vendor.at) == TRIES


async def test_no_repeat_begins_past_the_deadline() -> None:
    clock = FakeClock()
    vendor = Vendor(clock, *[Unreachable("broke")] * 99)
    with pytest.raises(Unreachable):
        await asked(clock, "asking", vendor.ask, 1.0)
    assert vendor.at == [0, 0.25, 0.75]


async def test_what_is_wrong_is_not_repeated() -> None:
    clock = FakeClock()
    vendor = Vendor(clock, SandboxError("wrong"))
    with pytest.raises(SandboxError, match="wrong"):
        await asked(clock, "asking", vendor.ask)
    assert len(vendor.at) == 1


async def test_an_sdk_that_ignores_its_timeout_is_left() -> None:
    clock = FakeClock()

    async def never(timeout: float) -> str:
        await clock.sleep(10_000)
        return "late"

    with pytest.raises(DeadlineExceeded, match="asking"):
        await asked(clock, "asking", never, 5.0)
    assert clock.now() < 100


def test_the_program_needs_the_standard_library_only(tmp_path: Path) -> None:
    """It is uploaded as it is: no package of ours that is not in it, none of anybody's."""
    with zipfile.ZipFile(BytesIO(bundle())) as archive:
        names = set(archive.namelist())
        for name in names:
            for node in ast.walk(ast.parse(archive.read(name))):
                modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    modules = [str(node.module)]
                    modules += [f"{node.module}.{each.name}" for each in node.names]
                for module in modules:
                    top = module.partition(".")[0]
                    path = module.replace(".", "/")
                    known = top in sys.stdlib_module_names or f"{path}.py" in names
                    parent = path.rpartition("/")[0]
                    assert known or f"{path}/__init__.py" in names or f"{parent}.py" in names, (name, module)
    program = tmp_path / "helper.zip"
    program.write_bytes(bundle())
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-I", "-S", str(program), "ask", str(tmp_path / "empty"), "e30="]
    assert subprocess.run(command, capture_output=True, text=True).stdout == '{"state": "gone"}\n'


def test_the_same_sources_are_the_same_program() -> None:
    first = bundle()
    bundle.cache_clear()
    assert bundle() == first
