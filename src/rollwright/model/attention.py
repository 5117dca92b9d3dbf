"""Causal attention over whole rows laid back to back.

Role: the `Attend` of training and scoring. Neighbours: trainer, engine (`score`, cold checks). Invariant: a
token sees its own row up to itself and nothing else; in a layer with a window, only that many of the last.
Linear layers run on the N real tokens only; attention pads rows to the longest of the call, so a caller that
puts rows of like length together pays for little padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from rollwright.model.base import Attend, Shape

_BLOCK = 512
"""Queries of one call where a layer has a window: its mask is `_BLOCK` × (`_BLOCK` + window), not T × T."""


def positions(lengths: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """int64[Σ lengths]: 0, 1, … within each row."""
    return torch.cat([torch.arange(n, device=device) for n in lengths])


def causal(lengths: Sequence[int], shape: Shape | None = None) -> Attend:
    """An `Attend` for rows of these lengths, in this order, on whatever device the tokens are.

    `shape` gives scale and windows; without it the scale is 1/√D and every layer sees all before it.
    """
    rows, longest, total = len(lengths), max(lengths), sum(lengths)
    even = rows * longest == total
    place = positions(lengths) + torch.repeat_interleave(
        torch.arange(rows) * longest, torch.tensor(list(lengths))
    )
    scale = None if shape is None else shape.scale

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal place
        if not even and place.device != q.device:
            place = place.to(q.device)

        def spread(x: Tensor) -> Tensor:
            if not even:
                x = x.new_zeros(rows * longest, *x.shape[1:]).index_copy(0, place, x)
            return x.view(rows, longest, *x.shape[1:]).transpose(1, 2)

        window = None if shape is None else shape.windows[layer]
        if window is None or window >= longest:
            seen = F.scaled_dot_product_attention(
                spread(q), spread(k), spread(v), is_causal=True, scale=scale, enable_gqa=_grouped(q, k)
            )
        else:
            seen = _windowed(spread(q), spread(k), spread(v), window, scale)
        flat = seen.transpose(1, 2).reshape(rows * longest, *q.shape[1:])
        return flat if even else flat[place]

    return attend


def _grouped(q: Tensor, k: Tensor) -> bool:
    """Whether several query heads share a key head."""
    return q.shape[1] != k.shape[1]


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """[rows, H, T, D] where a token sees itself and the `window` - 1 before it, block by block of queries."""
    found = []
    for start in range(0, q.shape[2], _BLOCK):
        end = min(start + _BLOCK, q.shape[2])
        first = max(0, start - window + 1)
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        found.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, first:end],
                v[:, :, first:end],
                attn_mask=(back >= 0) & (back < window),
                scale=scale,
                enable_gqa=_grouped(q, k),
            )
        )
    return torch.cat(found, 2)
