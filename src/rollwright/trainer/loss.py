"""The policy-gradient loss of one token, its weighted mean, and what is measured on the way.

Role: the only formulas of the trainer. Neighbours: `torch_trainer` calls it with the trained tokens only.
Invariants: gradient exactly 0 where the weight is 0; on-policy the gradient is REINFORCE's; no importance
weight above the cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs float32[K] of `targets` under softmax(logits[K, V] / temperature), and the entropies
    float32[K] in
    nats (no gradient)."""
    scores = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def clipped_surrogate(
    new: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, cap: float
) -> tuple[Tensor, Tensor]:
    """−min(w·A, clip(w, 1 − low, 1 + high)·A) for each token, and where the clip took the gradient away
    (bool[K]).

    w is the importance weight exp(new − behaviour), cut at `cap`. PPO (arXiv 1707.06347), asymmetric as in
    DAPO (2503.14476). The cut matters where A < 0 and the token became likelier than when it was sampled:
    there PPO leaves w unbounded; here the gradient stays that of a truncated importance weight,
    −cap·A·∇new.
    """
    weight = (new.detach() - behaviour).clamp(max=math.log(cap)).exp()
    ratio = weight * (new - new.detach()).exp()  # value `weight`, gradient weight·∇new also where cut
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, clipped), (clipped > plain).detach()


def weighted_mean(losses: Tensor, weights: Tensor, total: float | None = None) -> Tensor:
    """Σ weights·losses ÷ Σ weights (or `total`, where a batch is summed in parts); what has no weight isn't
    looked
    at, be it infinite."""
    at = weights != 0
    return (losses[at] * weights[at]).sum() / (float(weights.sum()) if total is None else total)


@dataclass
class Tally:
    """Sums over the trained tokens of a step, each micro-batch added once."""

    updates: int = 0
    """Optimiser updates made so far; behind the first one the weights are no longer those that sampled."""
    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    ratio: float = 0.0
    gaps: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, entropy: Tensor) -> None:
        """A part of the loss, and the entropies of its tokens."""
        self.tokens += entropy.numel()
        self.loss += float(loss.detach())
        self.entropy += float(entropy.sum())

    def compare(self, new: Tensor, behaviour: Tensor, clipped: Tensor, fresh: Tensor) -> None:
        """The policy now against the one that sampled; `fresh` marks tokens where both should be the same.

        KL(behaviour ‖ policy) by the k3 estimator, r − 1 − log r (http://joschu.net/blog/kl-approx.html).
        """
        log_ratio = (new.detach() - behaviour).clamp(-30.0, 30.0)  # a figure to look at, so finite
        ratio = log_ratio.exp()
        self.clipped += int(clipped.sum())
        self.kl += float((ratio - 1 - log_ratio).sum())
        self.ratio = max(self.ratio, float(ratio.max()))
        if not self.updates:
            self.gaps.append(log_ratio.abs()[fresh])

    def metrics(self) -> dict[str, float]:
        """Means over the tokens (the loss: over the updates); figures nothing was measured for are absent."""
        found = {
            "loss": self.loss / self.updates,
            "entropy": self.entropy / self.tokens,
            "tokens": float(self.tokens),
        }
        if self.ratio:
            found |= {
                "clip_share": self.clipped / self.tokens,
                "kl_old": self.kl / self.tokens,
                "ratio_max": self.ratio,
            }
        gaps = torch.cat(self.gaps) if self.gaps else torch.empty(0)
        if gaps.numel():
            found |= {"logprob_gap": float(gaps.max()), "logprob_gap_mean": float(gaps.mean())}
        return found
