"""Every local backend against the abuse suite: what is declared is what happens."""

import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from backends import built

from rollwright.sandbox.base import Guarantee, SandboxProvider
from rollwright.testing.abuse import MODULES, PROBES, Finding, Probe, judge, observe

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKENDS = [
    pytest.param("process", marks=pytest.mark.slow),
    "landlock",
    pytest.param("native", marks=pytest.mark.needs("namespaces")),
    pytest.param("native-live", marks=[pytest.mark.needs("namespaces"), pytest.mark.slow]),
    pytest.param("bubblewrap", marks=[pytest.mark.needs("namespaces", "bubblewrap"), pytest.mark.slow]),
]
OPEN = {
    *("host_files", "host_environment", "roots_of_processes", "files_of_another_sandbox"),
    *("tcp_to_the_host", "udp_to_the_host", "abstract_socket", "socket_with_a_path"),
    *("signals_to_a_process_of_the_host", "signals_to_everybody", "shared_memory_of_the_host"),
    *("memory_of_many_processes", "two_hundred_megabytes_in_files", "five_thousand_files"),
}
"""What bare processes let through, whoever runs them."""


@pytest_asyncio.fixture(params=BACKENDS, scope="module", loop_scope="module")
async def provider(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    made = built(request.param, tmp_path_factory.mktemp("sandboxes"))
    await made.start()
    yield made
    assert made.live == 0, "a probe left a sandbox open"
    await made.close()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["provider"])


def of(module: ModuleType) -> Sequence[Probe]:
    return [each for each in PROBES if each.__module__ == module.__name__]


def through(findings: Sequence[Finding]) -> dict[str, str]:
    return {each.probe: each.observation.detail for each in findings if not each.observation.stopped}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
async def test_declared_is_observed(provider: SandboxProvider, module: ModuleType, backend: str) -> None:
    findings = await observe(provider, of(module))
    mismatches = judge(findings, provider.guarantees)
    assert not mismatches, "\n".join(each.text for each in mismatches)
    passed = through(findings)
    if backend == "native":  # whatever it declares; all of a sandbox's memory together takes a cgroup
        if provider.guarantees.memory is not Guarantee.ENFORCED:
            passed.pop("memory_of_many_processes", None)
        assert not passed
    elif backend == "process":  # else the suite would see nothing anywhere
        assert passed.keys() >= OPEN & {each.__name__ for each in of(module)}


async def test_every_probe_is_run() -> None:
    assert sum(len(of(module)) for module in MODULES) == len(PROBES)
    assert {each.__name__ for each in PROBES} >= OPEN
