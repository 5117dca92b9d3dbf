"""Attention over a part of a history: the output, and how much it weighs.

Role: the kernel under `attend`. Neighbours: none. Invariant: for any cut of the keys, parts put together by
their weights are attention over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What `scaled_dot_product_attention` calls on a CPU; alone it also gives the logs of the sums.
_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def partial(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q[B, H, n, D] over k, v [B, Hkv, m, D], H a multiple of Hkv; `mask`[n, m] is added
    to the scores; `causal` lets query i see keys up to i. Each query sees at least one key.

    Returns:
        [B, H, n, D], and [B, H, n]: log Σ exp(scores).
    """
    if k.shape[1] != q.shape[1]:
        if mask is None and not causal:  # every query sees every key: those of one KV head go side by side
            out, weight = partial(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k, v, scale)
            return out.reshape(q.shape), weight.reshape(q.shape[:3])
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if _FLASH is not None and q.device.type == "cpu":
        bias = None if mask is None else mask[None, None]
        out, weight = _FLASH(q, k, v, is_causal=causal, attn_mask=bias, scale=scale)
        return out, weight
    return plain(q, k, v, scale, mask=mask, causal=causal)


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in elementary operations, for devices without that kernel."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores + mask
    weight = scores.logsumexp(-1)
    return (scores - weight.unsqueeze(-1)).exp() @ v, weight
