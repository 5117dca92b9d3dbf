"""An engine behind HTTP, and several engines behind one, pass the suite of the engine seam: over a real
server on loopback."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opened import until_end
from served import Served
from torch import Tensor

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.remote.engine import RemoteEngine
from rollwright.engine.replicas import Replicas
from rollwright.events import NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.testing.engines import CHECKS, Make, Subject
from rollwright.types import PolicyVersion

VOCAB, CONTEXT = 40, 48
VERSION = PolicyVersion(run="suite")
PACE = 0.06
"""Seconds for a step, where a check must get a word in before the last token."""
PACED = {
    "check_abort",
    "check_cancel_frees",
    "check_close",
    "check_pause_abort",
    "check_pause_keep",
    "check_update_in_flight",
    "check_update_restarts",
    "check_update_stops",
}


class Slow(Decoder):
    """A model that takes its time: its answers are those of the others."""

    pace = 0.0

    def forward(self, ids: Tensor, positions: Tensor, attend: Any, keep: Tensor | None = None) -> Tensor:
        SystemClock().pause(self.pace)
        return super().forward(ids, positions, attend, keep)


def decoder(seed: int, pace: float = 0.0) -> Decoder:
    made = Slow(ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=32, context=CONTEXT), VOCAB)
    made.initialise(torch.Generator().manual_seed(seed))
    made.pace = pace
    return made


def embedded(pace: float = 0.0) -> Engine:
    return EmbeddedConfig().build(decoder(0, pace), VERSION, SystemClock(), NullSink())


def remote(folder: Path, pace: float = 0.0) -> Engine:
    served = until_end(Served(lambda: embedded(pace), folder))
    return RemoteEngine(served.address, SystemClock(), NullSink(), folder=folder, silence=8.0)


def two(first: Engine, second: Engine) -> Engine:
    return Replicas([first, second], SystemClock(), NullSink())


MAKERS: dict[str, Callable[[Path, float], Engine]] = {
    "remote": remote,
    "two embedded": lambda folder, pace: two(embedded(), embedded()),
    "remote and embedded": lambda folder, pace: two(remote(folder, pace), embedded(pace / 2)),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", MAKERS)
async def test_it_keeps_the_contract(
    name: str, check: Callable[[Make], Awaitable[None]], tmp_path: Path
) -> None:
    other = dict(decoder(1).named_parameters())
    pace = PACE if check.__name__ in PACED else 0.0
    await check(lambda: Subject(MAKERS[name](tmp_path, pace), VOCAB, CONTEXT, VERSION, other))
