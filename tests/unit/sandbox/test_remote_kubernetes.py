"""What only the Kubernetes backend does, and what it does when the cluster fails."""

import inspect
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rollwright.errors import MissingExtra, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.base import Guarantee, SandboxProvider, State
from rollwright.sandbox.remote import owner
from rollwright.sandbox.remote.config import KubernetesSandbox

if TYPE_CHECKING:
    from fake_kubernetes import FakeKubernetes

pytestmark = pytest.mark.needs("kubernetes-sandbox")


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator["FakeKubernetes"]:
    from fake_kubernetes import FakeKubernetes

    made = FakeKubernetes(tmp_path)
    async with made.server.serving():
        made.kubeconfig(tmp_path / "kubeconfig")
        yield made


def provider(fake: "FakeKubernetes", **settings: object) -> SandboxProvider:
    where = {
        "warmpool": "python-pool",
        "kubeconfig": str(fake._root / "kubeconfig"),
        "router_url": fake.server.url,
    }
    return KubernetesSandbox.model_validate(where | settings).build(Path())


@pytest.fixture
async def started(fake: "FakeKubernetes") -> AsyncIterator[SandboxProvider]:
    made = provider(fake)
    await made.start()
    yield made
    await made.close()
    assert not fake.machines and not fake.claims


async def test_claims_carry_their_owner_and_an_end(fake: "FakeKubernetes", started: SandboxProvider) -> None:
    sandbox = await started.create(owner="rollout/7")
    claim = fake.claims[sandbox.id]
    assert owner.labels("rollout/7").items() <= claim["metadata"]["labels"].items()
    ends = datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"])
    assert 800 < (ends - datetime.now(UTC)).total_seconds() < 1000
    await sandbox.set_timeout(100_000)
    ends = datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"])
    assert 99_000 < (ends - datetime.now(UTC)).total_seconds() < 101_000
    assert claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"


async def test_a_pool_that_is_not_there(fake: "FakeKubernetes") -> None:
    made = provider(fake, warmpool="nothing")
    with pytest.raises(SandboxUnavailable, match="name another `warmpool`"):
        await made.start()
    assert not fake.claims  # nothing half-made stays
    await made.close()


async def test_rights_that_are_missing_are_named(fake: "FakeKubernetes") -> None:
    fake.server.faults = [403]
    made = provider(fake)
    with pytest.raises(SandboxUnavailable, match="sandboxclaims"):
        await made.start()
    await made.close()


async def test_no_cluster(tmp_path: Path) -> None:
    made = KubernetesSandbox(warmpool="p", kubeconfig=str(tmp_path / "nothing")).build(Path())
    with pytest.raises(SandboxUnavailable, match="kubeconfig"):
        await made.start()


async def test_without_the_package_it_names_the_extra(
    fake: "FakeKubernetes", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(MissingExtra, match=r"rollwright\[kubernetes-sandbox\]"):
        await provider(fake).start()


async def test_another_network_is_another_pool(fake: "FakeKubernetes") -> None:
    made = provider(fake, networks={"lab": "lab-pool"})
    await made.start()
    with pytest.raises(SandboxError, match="not granted; granted: lab"):
        await made.create(owner="r", network="moon")
    with pytest.raises(SandboxUnavailable, match="lab-pool"):
        await made.create(owner="r", network="lab")
    assert made.live == 0
    await made.close()


async def test_a_busy_api_server_is_asked_again(fake: "FakeKubernetes", started: SandboxProvider) -> None:
    fake.server.faults = [429, 503]
    sandbox = await started.create(owner="r")
    assert (await sandbox.run_code("1", timeout=20)).value == "1"


async def test_a_lost_answer_makes_no_second_claim(fake: "FakeKubernetes", started: SandboxProvider) -> None:
    fake.server.faults = [500]
    await started.create(owner="r")
    assert len(fake.claims) == len(fake.machines) == 1


async def test_a_claim_that_is_gone_is_lost(fake: "FakeKubernetes", started: SandboxProvider) -> None:
    sandbox = await started.create(owner="r")
    claim = fake.claims.pop(sandbox.id)
    fake.machines.pop(claim["status"]["sandbox"]["name"]).kill()
    with pytest.raises(SandboxLost):
        await sandbox.run_code("1", timeout=5)
    assert sandbox.info().state is State.KILLED and started.live == 0


async def test_leftovers_of_a_dead_process_are_reaped(
    fake: "FakeKubernetes", started: SandboxProvider
) -> None:
    mine, left = await started.create(owner="r"), await started.create(owner="r")
    labels = fake.claims[left.id]["metadata"]["labels"]
    labels[owner.RUN] = labels[owner.RUN][:-1] + ("1" if labels[owner.RUN][-1] == "0" else "0")
    other = provider(fake)
    await other.start()
    assert set(fake.claims) == {mine.id}
    await other.close()


async def test_a_live_fork_is_refused_by_name(started: SandboxProvider) -> None:
    sandbox = await started.create(owner="r")
    with pytest.raises(SandboxError, match="no live fork"):
        await sandbox.fork(live=True)


async def test_a_clusters_policies_are_best_effort_at_most(started: SandboxProvider) -> None:
    assert Guarantee.ENFORCED not in {
        started.guarantees.fs,
        started.guarantees.net,
        started.guarantees.kill,
        started.guarantees.kernel_surface,
    }


def test_the_sdk_is_the_one_that_was_read() -> None:
    """What the backend uses of it beyond what the server above would miss."""
    from k8s_agent_sandbox import models
    from k8s_agent_sandbox.async_sandbox import AsyncSandbox
    from k8s_agent_sandbox.async_sandbox_client import AsyncSandboxClient

    create = inspect.signature(AsyncSandboxClient.create_sandbox).parameters
    assert list(create)[1:5] == ["warmpool", "namespace", "sandbox_ready_timeout", "labels"]
    assert {"claim_name", "adopt_existing", "shutdown_after_seconds"} <= set(create)
    assert inspect.signature(AsyncSandboxClient).parameters["cleanup"].default is True
    assert hasattr(AsyncSandbox, "close_connection")
    models.SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip")
    models.SandboxGatewayConnectionConfig(gateway_name="g", server_port=1)
    models.SandboxInClusterConnectionConfig(server_port=1)
