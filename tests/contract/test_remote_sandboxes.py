"""The remote backends against the conformance suite: the real SDKs, and servers that speak their wire."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollwright.sandbox.base import SandboxProvider
from rollwright.sandbox.remote.config import E2BSandbox, KubernetesSandbox
from rollwright.testing import abuse, sandbox_life, sandboxes
from rollwright.testing.probes.base import PROBES, Probe

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECKS = [*sandboxes.CHECKS, *sandbox_life.CHECKS]
# of the abuse suite what holds on any machine; its walls are the vendor's, and these servers have none
KEPT = [
    each
    for each in PROBES
    if each.__module__.rpartition(".")[2] in ("exchange", "floods")
    and each.__name__ != "folders_swapped_for_links"  # takes 20 s
]
SMALL = {"file_mib": 1, "memory_mib": 256, "output_kib": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def e2b(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxProvider]:
    from fake_e2b import KEY, FakeE2B

    fake = FakeE2B(tmp_path_factory.mktemp("e2b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_API_KEY", KEY)
        patch.setenv("E2B_HTTP_VERSION", "1.1")
        async with fake.server.serving():
            made = E2BSandbox(
                api_url=fake.server.url, sandbox_url=fake.server.url, require=(), **SMALL
            ).build(Path())
            await made.start()
            yield made
            assert made.live == 0, "a check left a sandbox open"
            await made.close()
            assert not fake.machines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxProvider]:
    from fake_kubernetes import POOL, FakeKubernetes

    root = tmp_path_factory.mktemp("kubernetes")
    fake = FakeKubernetes(root)
    async with fake.server.serving():
        made = KubernetesSandbox(
            warmpool=POOL,
            kubeconfig=str(fake.kubeconfig(root / "kubeconfig")),
            router_url=fake.server.url,
            **SMALL,
        ).build(Path())
        await made.start()
        yield made
        assert made.live == 0, "a check left a sandbox open"
        await made.close()
        assert not fake.machines and not fake.claims


@pytest.mark.needs("e2b")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_e2b(e2b: SandboxProvider, check: sandboxes.Check) -> None:
    if check is sandbox_life.a_live_fork_keeps_variables_or_is_refused:
        pytest.skip("the server cannot copy a machine's memory")
    await check(e2b)


@pytest.mark.slow  # as many checks as E2B's, over the same helper
@pytest.mark.needs("kubernetes-sandbox")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_kubernetes(kubernetes: SandboxProvider, check: sandboxes.Check) -> None:
    await check(kubernetes)


@pytest.mark.slow
@pytest.mark.needs("e2b")
@pytest.mark.parametrize("probe", KEPT, ids=lambda probe: probe.__name__)
async def test_what_no_machine_may_let_through(e2b: SandboxProvider, probe: Probe) -> None:
    (found,) = await abuse.observe(e2b, [probe])
    assert found.observation.stopped, found.observation.detail
