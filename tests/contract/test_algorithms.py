"""Our algorithms keep the contract."""

from collections.abc import Callable

import pytest

from rollwright.algo.config import GrpoConfig, RlooConfig
from rollwright.testing.algorithms import CHECKS, Make

CONFIGS = [
    GrpoConfig(),
    GrpoConfig(scale="std"),
    GrpoConfig(aggregation="sequence"),
    GrpoConfig(bound=0.5),
    RlooConfig(),
    RlooConfig(aggregation="token"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_algorithm(check: Callable[[Make], None], config: GrpoConfig | RlooConfig) -> None:
    check(config.build)
