"""From the configuration to a remote engine, or to several as one.

Role: finds address and tokens. Neighbours: `RemoteConfig.build` calls it. Invariant: a token comes from the
server's file or from the environment, never from the configuration, which is kept in run folders.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rollwright.clock import Clock
from rollwright.engine.base import Engine
from rollwright.engine.config import RemoteConfig
from rollwright.engine.remote import secrets
from rollwright.engine.remote.address import Address, read
from rollwright.engine.remote.engine import RemoteEngine
from rollwright.engine.replicas import Replicas
from rollwright.errors import ConfigError, MissingExtra
from rollwright.events import Sink
from rollwright.pool.base import Lease


def connect(config: RemoteConfig, clock: Clock, events: Sink, lease: Lease | None = None) -> Engine:
    """An engine over the server that `config` names, `Replicas` over several; nothing is sent yet.

    Raises:
        ConfigError: no address file, or no token.
        MissingExtra: httpx is missing.
    """
    if find_spec("httpx") is None:
        raise MissingExtra("an engine in another process", "serve")
    files = config.addresses or ((config.address,) if config.address else ())
    places = [read(Path(file)) for file in files] or [(_named(config), None)]
    engines = [
        RemoteEngine(
            address,
            clock,
            events,
            folder=Path(config.weights) if config.weights else folder,
            silence=config.silence,
            patience=config.patience,
            lease=lease,
        )
        for address, folder in places
    ]
    return Replicas(engines, clock, events) if config.addresses else engines[0]


def _named(config: RemoteConfig) -> Address:
    """Where `url` points, with the tokens of the environment."""
    if not secrets.token():
        raise ConfigError(f"engine.url = {config.url!r}: set {secrets.PUBLIC} to the server's token")
    return Address(
        url=config.url.rstrip("/"),
        token=secrets.token(),
        control_url=config.control_url.rstrip("/"),
        control_token=secrets.control_token(),
    )
