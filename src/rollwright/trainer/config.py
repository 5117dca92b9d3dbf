"""Configuration of the trainer; no torch.

Role: what `[trainer]` holds. Neighbours: `torch_trainer`, imported when built; the conductor reads
`max_lag`. Invariant: no value that is accepted here contradicts another.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollwright.clock import Clock
from rollwright.plugins import PartConfig
from rollwright.trainer.base import Trainer


class TrainerConfig(PartConfig):
    """AdamW on a clipped policy-gradient loss."""

    type: Literal["torch"] = "torch"
    """The trainer in this process."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of policy steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moments."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices; norms have none."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of one update."""
    sft_lr: float = Field(default=2e-3, gt=0)
    """Learning rate of the supervised warm start, which has an optimiser of its own."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token whose probability fell below 1 − this share of its sampling time's isn't pushed further
    down."""
    clip_high: float = Field(default=0.28, gt=0)
    """A token whose probability rose above 1 + this share of its sampling time's isn't pushed further up."""
    importance_cap: float = Field(default=2.0, gt=1)
    """Largest importance weight of a token; only samples older than the weights reach it."""
    max_lag: int = Field(default=4, ge=0)
    """Optimiser steps between making and training a group; older groups are dropped as stale."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser updates that one batch is divided into."""
    microbatch_tokens: int = Field(default=2048, ge=1)
    """Tokens, padding included, of one forward and backward pass: bounds memory, changes no result. A
    longer row
    goes alone."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature the samples were drawn at; must be that of sampling, whose top_p must be 1."""
    seed: int = 0
    """Seed of the order of minibatches."""

    @model_validator(mode="after")
    def _agrees(self) -> TrainerConfig:
        if self.importance_cap < 1 + self.clip_high:
            raise ValueError(
                f"importance_cap {self.importance_cap} lies inside the clip range: give at least "
                f"1 + clip_high = {1 + self.clip_high:g}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        return self

    def build(self, decoder: Any, clock: Clock | None = None) -> Trainer:
        """A trainer that owns `decoder` (`rollwright.model.decoder.Decoder`)."""
        from rollwright.trainer.torch_trainer import TorchTrainer

        return TorchTrainer(decoder, self, clock=clock)
