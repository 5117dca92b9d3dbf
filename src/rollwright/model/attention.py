"""Causal attention over whole rows laid back to back.

Role: the `Attend` of training and scoring. Neighbours: trainer, engine (`score`, cold checks). Invariant: a
token sees its own row up to itself and nothing else. Linear layers run on the N real tokens only; attention
pads rows to the longest of the call, so a caller that puts rows of like length together pays for little
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from rollwright.model.base import Attend


def positions(lengths: Sequence[int]) -> Tensor:
    """int64[Σ lengths]: 0, 1, … within each row."""
    return torch.cat([torch.arange(n) for n in lengths])


def causal(lengths: Sequence[int]) -> Attend:
    """An `Attend` for rows of these lengths, in this order."""
    rows, longest, total = len(lengths), max(lengths), sum(lengths)
    even = rows * longest == total
    place = positions(lengths) + torch.repeat_interleave(
        torch.arange(rows) * longest, torch.tensor(list(lengths))
    )

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def spread(x: Tensor) -> Tensor:
            if not even:
                x = x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, place, x)
            return x.view(rows, longest, *x.shape[1:]).transpose(1, 2)

        seen = F.scaled_dot_product_attention(
            spread(q), spread(k), spread(v), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        flat = seen.transpose(1, 2).reshape(rows * longest, *q.shape[1:])
        return flat if even else flat[place]

    return attend
