"""Both local backends against the conformance suite."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollwright.sandbox.base import SandboxProvider
from rollwright.sandbox.local import LandlockProvider, ProcessProvider
from rollwright.testing.sandboxes import CHECKS, SMALL, Check

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(params=["landlock", "process"], scope="module", loop_scope="module")
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    root = tmp_path_factory.mktemp("sandboxes")
    made: LandlockProvider | ProcessProvider
    if request.param == "landlock":
        made = LandlockProvider(root, limits=SMALL)
    else:
        made = ProcessProvider(root, limits=SMALL, unsafe=True)
    await made.start()
    yield made
    assert made.live == 0, "a check left a sandbox open"
    await made.close()
    assert [path.name for path in root.iterdir()] == ["zygote.log"]
    assert (root / "zygote.log").read_text() == ""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(provider: SandboxProvider, check: Check) -> None:
    await check(provider)


async def test_the_walls_keep_what_a_run_requires(provider: SandboxProvider) -> None:
    missing = provider.guarantees.missing(("fs", "net", "kill"))
    assert missing == ([] if isinstance(provider, LandlockProvider) else ["fs", "net", "kill"])
