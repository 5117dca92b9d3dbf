"""Sandboxes on other people's machines, in a configuration.

Role: configuration of entry-point group `rollwright.sandboxes`. Neighbours: the conductor calls `build`;
`root` is not used, nothing of these sandboxes is on this machine. Invariant: no key is in a
configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollwright.clock import Clock, SystemClock
from rollwright.plugins import PartConfig
from rollwright.pool.base import Lease
from rollwright.sandbox.base import GuaranteeName, Limits, SandboxProvider


class _Remote(PartConfig):
    cpu_seconds: int = Field(60, ge=1)
    """CPU seconds each process of a sandbox may use in all; a call past it ends with TIMEOUT."""
    memory_mib: int = Field(512, ge=64)
    """MiB of address space of each process; more ends the call with MEMORY."""
    file_mib: int = Field(32, ge=1)
    """MiB of the largest file that may be written or read."""
    disk_mib: int = Field(256, ge=1)
    """MiB of all files that an upload, a download or a snapshot may hold."""
    processes: int = Field(16, ge=1)
    """Processes of one sandbox; not enforced for root, see the probed guarantee `pids`."""
    output_kib: int = Field(64, ge=1)
    """KiB (characters) one call may print; more ends it with OUTPUT."""
    max_live: int = Field(64, ge=1)
    """Sandboxes alive at once; `create` waits beyond. Vendors have quotas of their own."""
    lease_seconds: float = Field(900.0, ge=30)
    """Seconds after which the vendor ends a sandbox whose owner has died; renewed while it lives."""
    python: str = Field("python3", pattern=r"^[\w./-]+$")
    """The interpreter in the image, 3.11 or newer."""

    def limits(self) -> Limits:
        """As the sandbox takes them."""
        return Limits(
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_mib * 2**20,
            file_bytes=self.file_mib * 2**20,
            disk_bytes=self.disk_mib * 2**20,
            processes=self.processes,
            output_bytes=self.output_kib * 2**10,
        )


class E2BSandbox(_Remote):
    """E2B's microVMs, or a service that speaks its API; the key is read from E2B_API_KEY."""

    type: Literal["e2b"] = "e2b"
    template: str = "base"
    """Name or id of the template that sandboxes are made of."""
    internet: bool = False
    """True grants the network "internet" to who asks for it by name; otherwise there is none."""
    require: tuple[GuaranteeName, ...] = ("net",)
    """Guarantees that must be enforced, as probed at start; else `SandboxUnavailable`."""
    domain: str = ""
    """Domain of another installation of E2B; empty is E2B_DOMAIN or theirs."""
    api_url: str = ""
    """URL of its API; empty is the domain's."""
    sandbox_url: str = ""
    """URL through which sandboxes are reached; empty is the domain's."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider of sandboxes at E2B."""
        from rollwright.sandbox.remote.e2b import E2B
        from rollwright.sandbox.remote.provider import RemoteProvider

        vendor = E2B(
            template=self.template,
            internet=self.internet,
            lease_seconds=self.lease_seconds,
            domain=self.domain,
            api_url=self.api_url,
            sandbox_url=self.sandbox_url,
        )
        return RemoteProvider(
            vendor,
            limits=self.limits(),
            require=self.require,
            max_live=self.max_live,
            lease_seconds=self.lease_seconds,
            python=self.python,
            lease=lease,
            clock=clock,
        )


class KubernetesSandbox(_Remote):
    """Pods of a warm pool of the agent-sandbox controller."""

    type: Literal["kubernetes"] = "kubernetes"
    warmpool: str = Field(min_length=1)
    """Name of the SandboxWarmPool whose pods have no network."""
    networks: dict[str, str] = Field(default_factory=dict)
    """Other networks, by name: the SandboxWarmPool whose pods have it."""
    require: tuple[GuaranteeName, ...] = ()
    """Guarantees that must be enforced, as probed at start; else `SandboxUnavailable`. A cluster's are best
    effort: its policies are not this program's to set."""
    namespace: str = "default"
    """Namespace of the claims."""
    kubeconfig: str = ""
    """Path of a kubeconfig; empty is the pod's service account, else the default one."""
    context: str = ""
    """Context in it; empty is the current one."""
    router_url: str = ""
    """URL of the sandbox router; empty is `gateway`."""
    gateway: str = ""
    """Name of the router's Gateway; empty where this program runs inside the cluster."""
    runtime: Literal["python", "sandboxd"] = "python"
    """What listens in the pods; "sandboxd" needs the SDK's extra `grpc` and a place inside the cluster."""
    port: int = Field(8888, ge=1, le=65535)
    """Port on which the python runtime listens."""

    def build(self, root: Path, *, lease: Lease | None = None, clock: Clock | None = None) -> SandboxProvider:
        """A provider of sandboxes in a cluster."""
        from rollwright.sandbox.remote.kubernetes import Cluster, Kubernetes
        from rollwright.sandbox.remote.provider import RemoteProvider

        cluster = Cluster(
            warmpool=self.warmpool,
            networks=self.networks,
            namespace=self.namespace,
            kubeconfig=self.kubeconfig,
            context=self.context,
            router_url=self.router_url,
            gateway=self.gateway,
            runtime=self.runtime,
            port=self.port,
        )
        clock = clock or SystemClock()
        return RemoteProvider(
            Kubernetes(cluster, clock),
            limits=self.limits(),
            require=self.require,
            max_live=self.max_live,
            lease_seconds=self.lease_seconds,
            python=self.python,
            lease=lease,
            clock=clock,
        )
