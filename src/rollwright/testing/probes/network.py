"""Attempts at sockets outside.

Role: probes of the guarantee `net`. Neighbours: `bait` listens. Invariant: a sandbox may have a loopback of
its own; what counts is what arrives at the host's.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from rollwright.sandbox.base import SandboxProvider
from rollwright.testing.probes import bait
from rollwright.testing.probes.base import Observation, agent, attacked, probe, ran

_SEND = """
def send(address):
    with socket.socket(family, kind) as end:
        end.settimeout(1)
        end.connect(address)
        end.send(b'!')
        return 'sent'
attempt(lambda: send(tuple(address) if isinstance(address, list) else address))
"""


async def _sent(provider: SandboxProvider, name: str, family: int, kind: int) -> Observation:
    """Whether something comes through to the host's socket of that name."""
    with bait.sockets() as outside:
        if name not in outside.ends:
            return Observation("net", True, "this machine has no such socket")
        host, port = (outside.host(name), outside.port(name)) if family != socket.AF_UNIX else ("", 0)
        address = f"({host!r}, {port})" if host else repr(outside.name(name))
        code = agent(f"address = {address}\n{_SEND}", family=int(family), kind=int(kind))
        async with attacked(provider) as sandbox:
            told = await ran(sandbox, code)
        reached = outside.reached()
    return Observation("net", not reached, f"reached: {reached}, the agent says {told}")


@probe
async def tcp_to_the_host(provider: SandboxProvider) -> Observation:
    """The host's loopback."""
    return await _sent(provider, "tcp", socket.AF_INET, socket.SOCK_STREAM)


@probe
async def tcp_to_the_hosts_address(provider: SandboxProvider) -> Observation:
    """The address that other machines see."""
    return await _sent(provider, "outward", socket.AF_INET, socket.SOCK_STREAM)


@probe
async def tcp_over_ipv6(provider: SandboxProvider) -> Observation:
    """The host's IPv6 loopback."""
    return await _sent(provider, "tcp6", socket.AF_INET6, socket.SOCK_STREAM)


@probe
async def udp_to_the_host(provider: SandboxProvider) -> Observation:
    """The host's loopback, without a connection."""
    return await _sent(provider, "udp", socket.AF_INET, socket.SOCK_DGRAM)


@probe
async def abstract_socket(provider: SandboxProvider) -> Observation:
    """An abstract UNIX socket, which has no file."""
    return await _sent(provider, "abstract", socket.AF_UNIX, socket.SOCK_STREAM)


@probe
async def abstract_datagram_socket(provider: SandboxProvider) -> Observation:
    """The same for datagrams."""
    return await _sent(provider, "abstract-datagram", socket.AF_UNIX, socket.SOCK_DGRAM)


@probe
async def socket_with_a_path(provider: SandboxProvider) -> Observation:
    """A UNIX socket in a folder of the host."""
    return await _sent(provider, "path", socket.AF_UNIX, socket.SOCK_STREAM)


_PAIR = """
def redirect():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.connect(name)
    ours.send(b'!')
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.sendto(b'!', name)
attempt(redirect)
"""


@probe
async def socket_pair_pointed_outside(provider: SandboxProvider) -> Observation:
    """A pair of its own, connected anew to a socket of the host."""
    with bait.sockets() as outside:
        async with attacked(provider) as sandbox:
            await ran(sandbox, agent(_PAIR, name=outside.name("abstract-datagram")))
        reached = outside.reached()
    return Observation("net", not reached, f"reached: {reached}")


_VSOCK = """
def make():
    with socket.socket(40, socket.SOCK_STREAM) as end:
        if port:
            end.settimeout(1)
            end.connect((1, port))
        return 'made'
attempt(make)
"""


@probe
async def socket_of_the_hypervisor(provider: SandboxProvider) -> Observation:
    """AF_VSOCK leads out of every network namespace: making one is enough."""
    with contextlib.ExitStack() as stack:
        listening = _loopback(stack.enter_context)
        async with attacked(provider) as sandbox:
            told = await ran(sandbox, agent(_VSOCK, port=listening))
    return Observation("net", "made" not in told, f"{told}, host port {listening or 'none'}")


def _loopback(keep: Callable[[socket.socket], socket.socket]) -> int:
    """Port of a listening AF_VSOCK socket; 0 where the machine has no loopback for it."""
    with contextlib.suppress(OSError, AttributeError):
        end = keep(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
        end.bind((1, 0xFFFFFFFF))
        end.listen()
        return int(end.getsockname()[1])
    return 0
