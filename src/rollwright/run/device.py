"""The device that an engine computes on.

Role: `engine.device` becomes a model there. Neighbours: `rollout_side` and `serving` build engines.
Invariant: on the CPU the model stays the very one it was, so that coupled mode shares weights with the
trainer; anywhere else the engine gets a copy, and the trainer's stays where it is.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch

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


def placed(decoder: D, where: torch.device) -> D:
    """`decoder` on the CPU, a copy of it on any other device."""
    return decoder if where.type == "cpu" else deepcopy(decoder).to(where)
