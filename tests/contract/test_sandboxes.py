"""Every local backend against the conformance suite."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollwright.sandbox.base import SandboxProvider
from rollwright.sandbox.bubblewrap import BubblewrapProvider
from rollwright.sandbox.local import LandlockProvider, ProcessProvider
from rollwright.sandbox.native.provider import NativeProvider
from rollwright.sandbox.provider import LocalProvider
from rollwright.testing import sandbox_life, sandboxes
from rollwright.testing.sandboxes import SMALL, Check

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKENDS = [
    "native",
    "native-live",
    pytest.param("bubblewrap", marks=pytest.mark.needs("namespaces", "bubblewrap")),
    "landlock",
    "process",
]


def made(backend: str, root: Path) -> LocalProvider:
    if backend == "native-live":
        return NativeProvider(root, limits=SMALL, live=True)
    if backend == "native":
        return NativeProvider(root, limits=SMALL)
    if backend == "bubblewrap":
        return BubblewrapProvider(root, limits=SMALL)
    if backend == "landlock":
        return LandlockProvider(root, limits=SMALL)
    return ProcessProvider(root, limits=SMALL, unsafe=True)


@pytest_asyncio.fixture(params=BACKENDS, scope="module", loop_scope="module")
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    root = tmp_path_factory.mktemp("sandboxes")
    provider = made(request.param, root)
    await provider.start()
    yield provider
    assert provider.live == 0, "a check left a sandbox open"
    await provider.close()
    assert [path.name for path in root.iterdir()] == ["zygote.log"]
    assert (root / "zygote.log").read_text() == ""


@pytest.mark.parametrize("check", [*sandboxes.CHECKS, *sandbox_life.CHECKS], ids=lambda check: check.__name__)
async def test_conformance(provider: SandboxProvider, check: Check) -> None:
    await check(provider)


async def test_the_walls_keep_what_a_run_requires(provider: SandboxProvider) -> None:
    missing = provider.guarantees.missing(("fs", "net", "kill"))
    assert missing == (["fs", "net", "kill"] if isinstance(provider, ProcessProvider) else [])
