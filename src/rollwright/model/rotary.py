"""The table of rotary position embeddings: cosines and sines of every position.

Role: how `decoder` turns positions into rotations. Neighbours: `decoder` keeps the table, `lean` says how a
checkpoint's is made. Invariant: a position's row depends on the position only. Formulas: RoPE arXiv
2104.09864; the stretching of Llama 3, arXiv 2407.21783 and transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stretch:
    """Llama 3's change of the frequencies for contexts longer than the model was first trained on."""

    factor: float
    """How much longer the slow waves become."""
    low: float
    """Waves longer than `context` / `low` are slow."""
    high: float
    """Waves shorter than `context` / `high` stay; between the two the change is blended."""
    context: int
    """Tokens of the context before."""


def table(
    head_dim: int, context: int, theta: float, stretch: Stretch | None = None, *, single: bool = False
) -> tuple[Tensor, Tensor]:
    """float32[context, 1, head_dim] cosines, and sines with their first half negated.

    Angles are computed in double precision; with `single` as transformers does it, in float32, so that a
    checkpoint gives the logits it gives there.
    """
    kind = torch.float32 if single else torch.float64
    half = head_dim // 2
    exponent = torch.arange(half, dtype=kind) / half
    frequency = 1.0 / theta**exponent if single else theta**-exponent
    if stretch is not None:
        frequency = _stretched(frequency, stretch)
    angle = torch.outer(torch.arange(context, dtype=kind), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), 1).float().unsqueeze(1), torch.cat((-sin, sin), 1).float().unsqueeze(1)


def _stretched(frequency: Tensor, stretch: Stretch) -> Tensor:
    """Frequencies after the stretch."""
    wave = 2 * math.pi / frequency
    longest, shortest = stretch.context / stretch.low, stretch.context / stretch.high
    slow = frequency / stretch.factor
    smooth = (stretch.context / wave - stretch.low) / (stretch.high - stretch.low)
    blended = (1 - smooth) * slow + smooth * frequency
    return torch.where(wave > longest, slow, torch.where(wave < shortest, frequency, blended))
