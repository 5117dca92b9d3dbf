"""The loss: its regions by hand, its gradient against a naive one, and its masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.trainer.loss import Tally, clipped_surrogate, token_logprobs, weighted_mean

LOW, HIGH, CAP = 0.2, 0.28, 2.0


def surrogate(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss of one token, its gradient by the new logprob, and whether it was clipped."""
    new = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    behaviour, advantages = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage])
    loss, clipped = clipped_surrogate(new, behaviour, advantages, clip_low=LOW, clip_high=HIGH, cap=CAP)
    (slope,) = torch.autograd.grad(loss.sum(), new)
    return float(loss.detach()), float(slope), bool(clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.0, -2.0, 2.0, 2.0, False),
        (1.2, 1.0, -1.2, -1.2, False),  # inside
        (1.5, 1.0, -1.28, 0.0, True),  # encouraged enough
        (0.5, 1.0, -0.5, -0.5, False),  # encouraged, but became rarer: still pushed
        (0.9, -1.0, 0.9, 0.9, False),
        (0.5, -1.0, 0.8, 0.0, True),  # discouraged enough
        (1.5, -1.0, 1.5, 1.5, False),  # discouraged, but became likelier: still pushed
        (9.0, -1.0, 2.0, 2.0, False),  # no more than the cap
        (9.0, 1.0, -1.28, 0.0, True),
    ],
)
def test_regions(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    found = surrogate(ratio, advantage)
    assert found[:2] == pytest.approx((loss, slope), abs=1e-6)
    assert found[2] is clipped


@given(st.floats(-60, 60), st.floats(-10, 10, width=32, allow_subnormal=False))
@settings(max_examples=200, deadline=None)
def test_no_token_pushes_harder_than_the_cap(log_ratio: float, advantage: float) -> None:
    new = torch.tensor([log_ratio - 1.0], requires_grad=True)
    loss, _ = clipped_surrogate(
        new, torch.tensor([-1.0]), torch.tensor([advantage]), clip_low=LOW, clip_high=HIGH, cap=CAP
    )
    (slope,) = torch.autograd.grad(loss.sum(), new)
    assert abs(float(slope)) <= CAP * abs(advantage) * (1 + 1e-5)
    assert float(slope) * advantage <= 0


def test_on_policy_the_gradient_is_reinforce() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    targets, advantages = torch.randint(5, (7,)), torch.randn(7, dtype=torch.float64)
    weights = torch.tensor([1, 0, 2, 1, 0.5, 1, 0], dtype=torch.float64)
    new, _ = token_logprobs(logits, targets, 1.0)
    losses, _ = clipped_surrogate(new, new.detach(), advantages, clip_low=LOW, clip_high=HIGH, cap=CAP)
    (found,) = torch.autograd.grad(weighted_mean(losses, weights), logits)
    naive = torch.zeros(())
    for t in range(7):  # −Σ w·A·log π ÷ Σ w
        naive = naive - weights[t] * advantages[t] * torch.log(torch.softmax(logits[t], 0)[targets[t]])
    (expected,) = torch.autograd.grad(naive / weights.sum(), logits)
    assert torch.allclose(found, expected, atol=1e-12)
    assert found[[1, 6]].count_nonzero() == 0


def test_a_masked_token_is_not_in_the_mean() -> None:
    losses = torch.tensor([[1.0, 100.0], [1.0, -50.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    mean = weighted_mean(losses, mask)
    assert float(mean.detach()) == 1.0
    (slope,) = torch.autograd.grad(mean, losses)
    assert slope.tolist() == [[0.5, 0.0], [0.5, 0.0]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_masked_token_may_be_anything(bad: float) -> None:
    losses = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    mean = weighted_mean(losses, torch.tensor([1.0, 0.0, 1.0]))
    (slope,) = torch.autograd.grad(mean, losses)
    assert float(mean.detach()) == 2.0
    assert slope.tolist() == [0.5, 0.0, 0.5]


def test_temperature_and_entropy() -> None:
    logits = torch.tensor([[0.0, math.log(4.0)]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 2.0)
    assert float(logprobs) == pytest.approx(math.log(2 / 3))
    assert float(entropy) == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))


def test_tally_by_hand() -> None:
    tally = Tally()
    tally.compare(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.5, -2.0]),
        torch.tensor([True, False]),
        torch.tensor([True, False]),
    )
    tally.add(torch.tensor(3.0), torch.tensor([1.0, 2.0]))
    tally.updates = 1
    found = tally.metrics()
    assert found["kl_old"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert found["ratio_max"] == pytest.approx(math.exp(0.5))
    assert (found["clip_share"], found["entropy"], found["loss"]) == (0.5, 1.5, 3.0)
    assert found["logprob_gap"] == found["logprob_gap_mean"] == 0.5


def test_figures_without_data_are_absent() -> None:
    tally = Tally(updates=1)
    off, on = torch.tensor([False]), torch.tensor([True])
    tally.add(torch.tensor(1.0), torch.tensor([1.0]))
    assert tally.metrics().keys() == {"loss", "entropy", "tokens"}
    tally.compare(torch.tensor([-1.0]), torch.tensor([-1.0]), off, on)  # after an update: no gap
    assert "logprob_gap" not in tally.metrics()
    assert "kl_old" in tally.metrics()
