"""The device that an engine computes on.

Role: `engine.device` becomes a model there. Neighbours: `rollout_side` and `serving` build engines,
`preflight` asks whether the device is there.
Invariant: on the CPU the model stays the very one it was, so that coupled mode shares weights with the
trainer; anywhere else the engine gets a copy, and the trainer's stays where it is.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
from pydantic import ValidationError

from rollwright.engine.config import EmbeddedConfig
from rollwright.errors import ConfigError
from rollwright.model.decoder import Decoder
from rollwright.plugins import PartConfig

D = TypeVar("D", bound=Decoder)


def device(engine: PartConfig) -> torch.device:
    """Where the engine of this configuration computes; engines that are elsewhere say it themselves.

    Raises:
        ConfigError: this machine, or this build of torch, has no such device.
    """
    if not isinstance(engine, EmbeddedConfig):
        return torch.device("cpu")
    try:
        found = torch.device(engine.device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch is not of one mind
        why = str(error).splitlines()[0]
        raise ConfigError(f"engine.device = '{engine.device}' cannot be used here: {why}") from error
    return found


def present(engine: PartConfig) -> None:
    """Refuse an accelerator that is not there, allocating nothing: what a run asks before it makes its
    folder. Where it is there and cannot be used, `device` says so.

    Raises:
        ConfigError: this machine, or this build of torch, has no such device.
    """
    if not isinstance(engine, EmbeddedConfig) or engine.device == "cpu":
        return
    kind, _, index = engine.device.partition(":")  # torch.device itself refuses large numbers
    if kind == "mps":
        there = int(torch.backends.mps.is_available())
    else:
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= there:
        raise ConfigError(
            f"engine.device = '{engine.device}' cannot be used here: torch finds {there} devices of the kind "
            f"{kind}; set engine.device = 'cpu', or install a torch build for the accelerator"
        )


def on(engine: EmbeddedConfig, name: str | None) -> EmbeddedConfig:
    """`engine` on the device that `--device` names; None leaves it.

    Raises:
        ConfigError: no device is called so.
    """
    if name is None:
        return engine
    try:
        return EmbeddedConfig(**{**dict(engine), "device": name})
    except ValidationError as error:
        raise ConfigError(f"--device {name!r}: expected cpu, cuda, cuda:1 or mps") from error


def placed(decoder: D, where: torch.device) -> D:
    """`decoder` on the CPU, a copy of it on any other device."""
    return decoder if where.type == "cpu" else deepcopy(decoder).to(where)
