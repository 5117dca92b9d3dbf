"""Our rewards keep the contract."""

from collections.abc import Awaitable, Callable

import pytest

from rollwright.reward.config import RewardConfig
from rollwright.testing.rewards import CHECKS, Make


@pytest.mark.parametrize("mode", ["strict", "layered"])
@pytest.mark.parametrize("check", CHECKS)
async def test_reward(check: Callable[[Make], Awaitable[None]], mode: str) -> None:
    await check(RewardConfig.model_validate({"mode": mode}).build)
