"""The trainer seam: samples in, one optimiser step out.

Role: changes the weights. Neighbours: the conductor feeds it batches and publishes what it gives.
Invariants: algorithm-blind (only per-token advantages and weights arrive); gradient only where a token was
sampled; its state round-trips through bytes without pickle; metrics without data are absent, not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

from rollwright.types import Batch, Ints, Probe, Row


class StepReport(Struct, frozen=True, kw_only=True):
    """One optimiser step. `metrics` names: loss, entropy (nats a token), grad_norm, clip_share, ratio_max,
    kl_old, logprob_gap (|trainer − behaviour| of tokens made by the same version), tokens, padding_share,
    seconds."""

    metrics: dict[str, float]


class Trainer(Protocol):
    """Owns model and optimiser."""

    def step(self, batch: Batch, rate: float = 1.0) -> StepReport:
        """One update at `rate` times the learning rate (schedules belong to whoever knows how far the run
        is). Raises `NoSignal` where no sample has a non-zero advantage and weight."""

    def supervise(self, rows: list[Row], rate: float = 1.0) -> StepReport:
        """One supervised update: cross-entropy on the tokens marked `SAMPLED`."""

    @property
    def supervised(self) -> int:
        """Supervised updates so far, those before a `restore` included."""

    def weights(self) -> Mapping[str, Any]:
        """Name → tensor, live (not a copy)."""

    def probe(self, tokens: Ints) -> Probe:
        """Logprobs of `tokens` under the weights now, for engines to reproduce."""

    def state(self) -> bytes:
        """Weights, optimiser and RNG as one blob."""

    def restore(self, data: bytes) -> None:
        """Back to what `state` returned. Raises `SchemaError` for anything else."""
