"""Kubernetes with the agent-sandbox controller.

Role: `Vendor` and `Machine` over the SDK `k8s-agent-sandbox`. Neighbours: `provider`, `config`.
Invariants: rights come from the pod's service account or a kubeconfig; every call has a timeout; a
claim's name is made from the caller's key, so that a repeated creation finds its own.

A machine is a pod of a warm pool; what keeps it apart (gVisor, Kata, or only namespaces) and what network
it has say the pool's template and the cluster's policies, not this file. Another network is another pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from rollwright.clock import Clock
from rollwright.errors import MissingExtra, SandboxError, SandboxLost, SandboxUnavailable
from rollwright.sandbox.remote.adapter import Busy, Machine, Owned, Ran, Unreachable

if TYPE_CHECKING:
    from k8s_agent_sandbox.async_sandbox import AsyncSandbox
    from k8s_agent_sandbox.async_sandbox_client import AsyncSandboxClient

_GONE_SECONDS = 0.25
"""Between two looks whether a deleted sandbox is gone."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the sandboxes are and how they are reached."""

    warmpool: str
    networks: Mapping[str, str]
    """Name of a network → the warm pool that has it."""
    namespace: str = "default"
    kubeconfig: str = ""
    context: str = ""
    router_url: str = ""
    """URL of the sandbox router; or:"""
    gateway: str = ""
    """Name of its Gateway; without either, pods are reached from inside the cluster."""
    runtime: Literal["python", "sandboxd"] = "python"
    """What listens in the pods; sandboxd is reached from inside the cluster only."""
    port: int = 8888


class _Sink:
    """Where a file's contents go."""

    def __init__(self) -> None:
        self.data = bytearray()

    async def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


@contextlib.asynccontextmanager
async def _translated(what: str, timeout: float) -> AsyncIterator[None]:
    """The exceptions of the SDK and of Kubernetes' client as ours, and a deadline, which the latter lacks."""
    import aiohttp
    from k8s_agent_sandbox import exceptions as theirs
    from kubernetes_asyncio.client import ApiException  # type: ignore[import-untyped,unused-ignore]

    try:
        async with asyncio.timeout(timeout):
            yield
    except SandboxError:
        raise
    except ApiException as error:
        raise _refused(what, error.status or 0, f"{error.status} {error.reason}") from error
    except theirs.SandboxRequestError as error:
        status = error.status_code or 0
        failure = Busy if status == 429 else Unreachable
        raise failure(f"{what}: {status or 'no answer'}: {error}") from error
    except (theirs.SandboxTemplateNotFoundError, theirs.SandboxWarmPoolNotFoundError) as error:
        raise SandboxUnavailable(f"{what}: {error}. Make it, or name another `warmpool`") from error
    except theirs.SandboxClaimFailedError as error:
        raise SandboxUnavailable(f"{what}: {error}") from error
    except (theirs.SandboxNotFoundError, theirs.SandboxMetadataError) as error:
        raise SandboxLost(f"{what}: {error}") from error
    except (TimeoutError, aiohttp.ClientError, OSError, theirs.SandboxNotReadyError) as error:
        raise Unreachable(
            f"{what}: {type(error).__name__}: {error or f'no answer in {timeout:g} s'}"
        ) from error
    except Exception as error:  # boundary: the SDK raises bare RuntimeError, with the gRPC status in its text
        broken = "UNAVAILABLE" in str(error) or "DEADLINE_EXCEEDED" in str(error)
        failed = Unreachable if broken else SandboxError
        raise failed(f"{what}: {type(error).__name__}: {error}") from error


def _refused(what: str, status: int, said: str) -> SandboxError:
    """What an answer of the API server means."""
    if status in (429, 503):
        return Busy(f"{what}: {said}")
    if status >= 500 or status == 0:
        return Unreachable(f"{what}: {said}")
    if status in (401, 403):
        how = "give the service account rights on sandboxclaims (get, list, watch, create, patch, delete) and"
        return SandboxUnavailable(f"{what}: {said}: {how} sandboxes (get)")
    if status == 404:
        return SandboxUnavailable(
            f"{what}: {said}: install the agent-sandbox controller, with its extensions"
        )
    return SandboxError(f"{what}: {said}")


class KubernetesMachine:
    """See `Machine`. The SDK neither stops nor copies pods."""

    def __init__(
        self, id: str, sandbox: AsyncSandbox, client: AsyncSandboxClient[Any], cluster: Cluster, clock: Clock
    ) -> None:
        self.id, self._sandbox, self._client = id, sandbox, client
        self._cluster, self._clock = cluster, clock

    async def run(self, line: str, *, timeout: float) -> Ran:
        async with self._there(f"a command on {self.id}", timeout):
            assert self._sandbox.commands is not None
            ran = await self._sandbox.commands.run(line, timeout=math.ceil(timeout))
        return Ran(ran.stdout, ran.stderr, ran.exit_code)

    async def read(self, path: str, limit: int, *, timeout: float) -> bytes:
        sink = _Sink()
        async with self._there(f"reading from {self.id}", timeout):
            assert self._sandbox.files is not None
            await self._sandbox.files.read_to(path, sink, timeout=math.ceil(timeout), max_bytes=limit)
        return bytes(sink.data)

    async def write(self, path: str, data: bytes, *, timeout: float) -> None:
        async with self._there(f"writing to {self.id}", timeout):
            assert self._sandbox.files is not None
            await self._sandbox.files.write(path, data, timeout=math.ceil(timeout))

    @contextlib.asynccontextmanager
    async def _there(self, what: str, timeout: float) -> AsyncIterator[None]:
        """A failure to reach a claim that is gone is its loss."""
        try:
            async with _translated(what, timeout):
                if not self._sandbox.is_active:
                    raise SandboxLost(f"{what}: its connection was closed")
                yield
        except Unreachable as error:
            if not await self.alive(timeout=timeout):
                raise SandboxLost(f"{self.id}: its claim is gone") from error
            raise

    async def set_timeout(self, seconds: float, *, timeout: float) -> None:
        until = datetime.fromtimestamp(math.ceil(self._clock.wall() + seconds), UTC)
        lifecycle = {"shutdownTime": until.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}
        async with _translated(f"setting the timeout of {self.id}", timeout):
            try:
                await self._client.k8s_helper.custom_objects_api.patch_namespaced_custom_object(
                    **_claims(self._cluster.namespace),
                    name=self.id,
                    body={"spec": {"lifecycle": lifecycle}},
                    _content_type="application/merge-patch+json",
                )
            except Exception as error:  # boundary: only looked at, and raised on
                if getattr(error, "status", None) == 404:
                    raise SandboxLost(f"{self.id}: its claim is gone") from error
                raise

    async def kill(self, *, timeout: float) -> None:
        helper, began = self._client.k8s_helper, self._clock.now()
        async with _translated(f"killing {self.id}", timeout):
            await self._sandbox.close_connection()
            await helper.delete_sandbox_claim(self.id, self._cluster.namespace)
            while await helper.get_sandbox(self._sandbox.sandbox_id, self._cluster.namespace) is not None:
                if self._clock.now() - began > timeout:
                    raise Unreachable(f"killing {self.id}: its pod is not gone after {timeout:g} s")
                await self._clock.sleep(_GONE_SECONDS)

    async def alive(self, *, timeout: float) -> bool:
        async with _translated(f"asking for {self.id}", timeout):
            claim = await self._client.k8s_helper.get_sandbox_claim(self.id, self._cluster.namespace)
        return claim is not None and "deletionTimestamp" not in claim.get("metadata", {})


def _claims(namespace: str) -> dict[str, str]:
    from k8s_agent_sandbox import constants

    return {
        "group": constants.CLAIM_API_GROUP,
        "version": constants.CLAIM_API_VERSION,
        "namespace": namespace,
        "plural": constants.CLAIM_PLURAL_NAME,
    }


class Kubernetes:
    """See `Vendor`."""

    name = "kubernetes"
    isolation = "the pool's pods: what their runtime class and the cluster's policies say"
    denies_network = False

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self.networks: Sequence[str] = tuple(cluster.networks)
        self._client: AsyncSandboxClient[Any] | None = None
        self._api: Any = None

    @property
    def targets(self) -> Sequence[tuple[str, int]]:
        assert self._api is not None, "`open` comes first"
        urls = [urlsplit(url) for url in (self._api.configuration.host, self._cluster.router_url) if url]
        return [(u.hostname or "", u.port or (80 if u.scheme == "http" else 443)) for u in urls]

    async def open(self) -> None:
        try:
            from k8s_agent_sandbox.async_sandbox_client import AsyncSandboxClient
            from kubernetes_asyncio import client, config  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise MissingExtra("the sandbox backend 'kubernetes'", "kubernetes-sandbox") from error
        where = self._cluster
        try:
            if where.kubeconfig or where.context:
                self._api = await config.new_client_from_config(
                    where.kubeconfig or None, where.context or None, persist_config=False
                )
            else:
                try:
                    config.load_incluster_config()
                except config.ConfigException:
                    await config.load_kube_config()
                self._api = client.ApiClient()
        except (config.ConfigException, OSError) as error:
            raise SandboxUnavailable(f"no cluster: {error}. Name a `kubeconfig`, or run in a pod") from error
        self._client = AsyncSandboxClient(_connection(where), cleanup=False, api_client=self._api)

    async def create(
        self, labels: Mapping[str, str], network: str, seconds: float, key: str, *, timeout: float
    ) -> Machine:
        assert self._client is not None, "`open` comes first"
        name, where = f"rollwright-{key}", self._cluster
        pool = where.warmpool if network == "none" else where.networks[network]
        try:
            async with _translated(f"claiming a sandbox of pool '{pool}'", timeout):
                sandbox = await self._client.create_sandbox(
                    pool,
                    where.namespace,
                    math.ceil(timeout),
                    dict(labels),
                    claim_name=name,
                    adopt_existing=True,
                    shutdown_after_seconds=math.ceil(seconds),
                )
        except (Busy, Unreachable):
            raise  # the same name is tried again
        except BaseException:  # boundary: a claim that nobody will use goes
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self.kill(name, timeout=10.0))
            raise
        return KubernetesMachine(name, sandbox, self._client, where, self._clock)

    async def kill(self, id: str, *, timeout: float) -> None:
        assert self._client is not None, "`open` comes first"
        async with _translated(f"deleting the claim {id}", timeout):
            await self._client.k8s_helper.delete_sandbox_claim(id, self._cluster.namespace)

    async def owned(self, labels: Mapping[str, str], *, timeout: float) -> Sequence[Owned]:
        from kubernetes_asyncio.client import CustomObjectsApi

        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        async with _translated("listing the claims", timeout):
            found = await CustomObjectsApi(self._api).list_namespaced_custom_object(
                **_claims(self._cluster.namespace), label_selector=selector
            )
        about = [each.get("metadata", {}) for each in found.get("items", [])]
        return [Owned(each["name"], each.get("labels", {})) for each in about]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._api is not None:
            await self._api.close()
        self._client = self._api = None


def _connection(where: Cluster) -> Any:
    """How the SDK is to reach the pods."""
    from k8s_agent_sandbox import models

    if where.runtime == "sandboxd":
        return models.SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip")
    if where.router_url:
        return models.SandboxDirectConnectionConfig(api_url=where.router_url, server_port=where.port)
    if where.gateway:
        return models.SandboxGatewayConnectionConfig(gateway_name=where.gateway, server_port=where.port)
    return models.SandboxInClusterConnectionConfig(server_port=where.port)
