"""Where a served engine is, and the tokens that open its ports.

Role: the file that `rollwright serve` writes and clients read. Neighbours: the command line writes it,
`RemoteConfig` names it. Invariants: only its owner can read it, from the moment it exists; no `repr` shows a
token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollwright.errors import ConfigError, SchemaError
from rollwright.types import Record
from rollwright.wire import SCHEMA


@dataclass(frozen=True)
class Address:
    """URLs without a slash at the end. Without a control port there is no pause and no update."""

    url: str
    token: str = field(repr=False)
    control_url: str = ""
    control_token: str = field(default="", repr=False)


class _File(Record, frozen=True, kw_only=True):
    """The stored form, JSON for people to read."""

    schema: int
    url: str
    control_url: str
    token: str
    control_token: str
    weights: str = ""
    pid: int = 0


def write(path: Path, address: Address, weights: Path | None = None) -> None:
    """Write `address` where only this user can read it; what was there is replaced.

    Raises:
        ConfigError: it cannot be written there.
    """
    record = _File(
        schema=SCHEMA,
        url=address.url,
        control_url=address.control_url,
        token=address.token,
        control_token=address.control_token,
        weights="" if weights is None else str(weights.resolve()),
        pid=os.getpid(),
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the address of the server to {path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> tuple[Address, Path | None]:
    """What `write` wrote: the address, and the folder for weights.

    Raises:
        ConfigError: there is none, or others can read it.
        SchemaError: it is damaged.
    """
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: no address of a server ({error.strerror}): is it running?") from error
    if mode & 0o077:
        raise ConfigError(f"{path} holds tokens and others can read it: chmod 600 {path}")
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path} is no address of a server: {error}; start it again") from error
    if found.schema != SCHEMA:
        raise SchemaError(f"{path} has schema {found.schema}, expected {SCHEMA}: start the server anew")
    address = Address(
        url=found.url,
        token=found.token,
        control_url=found.control_url,
        control_token=found.control_token,
    )
    return address, Path(found.weights) if found.weights else None
