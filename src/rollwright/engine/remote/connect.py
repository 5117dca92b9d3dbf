"""From the configuration to a remote engine.

Role: finds address and tokens. Neighbours: `RemoteConfig.build` calls it. Invariant: a token comes from the
server's file or from the environment, never from the configuration, which is kept in run folders.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rollwright.clock import Clock
from rollwright.engine.config import RemoteConfig
from rollwright.engine.remote import secrets
from rollwright.engine.remote.address import Address, read
from rollwright.engine.remote.engine import RemoteEngine
from rollwright.errors import ConfigError, MissingExtra
from rollwright.events import Sink
from rollwright.pool.base import Lease


def connect(config: RemoteConfig, clock: Clock, events: Sink, lease: Lease | None = None) -> RemoteEngine:
    """An engine over the server that `config` names; nothing is sent yet.

    Raises:
        ConfigError: no address file, or no token.
        MissingExtra: httpx is missing.
    """
    if find_spec("httpx") is None:
        raise MissingExtra("an engine in another process", "serve")
    folder = None
    if config.address:
        address, folder = read(Path(config.address))
    else:
        if not secrets.token():
            raise ConfigError(f"engine.url = {config.url!r}: set {secrets.PUBLIC} to the server's token")
        address = Address(
            url=config.url.rstrip("/"),
            token=secrets.token(),
            control_url=config.control_url.rstrip("/"),
            control_token=secrets.control_token(),
        )
    return RemoteEngine(
        address,
        clock,
        events,
        folder=Path(config.weights) if config.weights else folder,
        silence=config.silence,
        patience=config.patience,
        lease=lease,
    )
