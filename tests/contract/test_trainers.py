"""Our trainer keeps the contract."""

from collections.abc import Callable

import pytest
import torch

from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.testing.trainers import CHECKS, Make
from rollwright.trainer.config import TrainerConfig

CONFIGS = [
    TrainerConfig(),
    TrainerConfig(microbatch_tokens=8),
    TrainerConfig(weight_decay=0.0, grad_clip=0.1, lr=3e-4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "small-microbatches", "careful"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_trainer(check: Callable[[Make], None], config: TrainerConfig) -> None:
    def make() -> object:
        torch.set_num_threads(1)
        decoder = Decoder(ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=32, context=64), vocab=32)
        decoder.initialise(torch.Generator().manual_seed(0))
        return config.build(decoder)

    check(make)  # type: ignore[arg-type]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_trainer_that_does_nothing_is_found(check: Callable[[Make], None]) -> None:
    """The suite can fail."""

    class Idle:
        def step(self, batch): ...
        def supervise(self, rows): ...
        def weights(self):
            return {}

        def probe(self, tokens): ...
        def state(self):
            return b""

        def restore(self, data): ...

    with pytest.raises((AssertionError, AttributeError)):
        check(Idle)
