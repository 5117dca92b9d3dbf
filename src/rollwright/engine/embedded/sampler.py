"""From logits to tokens: temperature, top-p, greedy, with noise that belongs to the request.

Role: draws the next tokens of a whole batch. Neighbours: `step` calls it. Invariants: the logprob returned
is that of the distribution really drawn from, after temperature and top-p (greedy draws from no
distribution; its logprob is that of the token at temperature 1, top-p 1). The noise of a token depends only
on (seed, request, position): a repeated request repeats whatever else is in the batch, up to float32
rounding of the logits.

Noise: SplitMix64's finaliser (Steele et al., OOPSLA 2014) as a counter-based hash, one uniform for each
token; drawn by inverse CDF.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats32 = npt.NDArray[np.float32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _40 = (np.uint64(bits) for bits in (30, 27, 31, 40))


def noise_key(seed: int, request: str) -> int:
    """64 bits that stand for a request: what `uniforms` is keyed by."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{request}".encode(), digest_size=8).digest(), "little")


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> Floats32:
    """float32[n] in [0, 1), 24 bits each, of uint64[n] keys and int64[n] positions."""
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    x ^= x >> _31
    noise: Floats32 = (x >> _40).astype(np.float32) * np.float32(2**-24)
    return noise


def sample(
    logits: Tensor, temperature: Floats32, top_p: Floats32, noise: Floats32
) -> tuple[npt.NDArray[np.int64], Floats32]:
    """Draw one token for each row.

    Args:
        logits: float32[n, V].
        temperature: float32[n]; 0 is greedy.
        top_p: float32[n] in (0, 1].
        noise: float32[n] uniforms.

    Returns:
        int64[n] ids and float32[n] logprobs.
    """
    greedy, narrow = temperature == 0, (top_p < 1) & (temperature != 0)
    scaled = logits
    if (temperature != 1).any():
        scale = np.where(greedy, np.float32(1), temperature)
        scaled = logits / torch.from_numpy(scale).unsqueeze(1)
    logp = scaled.log_softmax(-1)
    u = torch.from_numpy(noise).unsqueeze(1)
    if greedy.all():
        ids = logp.argmax(-1, keepdim=True)
    else:
        ids = _draw(logp.exp(), u)
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).unsqueeze(1), logp.argmax(-1, keepdim=True), ids)
    chosen = logp.gather(1, ids)
    if narrow.any():
        rows = torch.from_numpy(np.flatnonzero(narrow))
        ids[rows], chosen[rows] = _nucleus(logp[rows], torch.from_numpy(top_p[narrow]).unsqueeze(1), u[rows])
    return ids.squeeze(1).numpy(), chosen.squeeze(1).numpy()


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: int64[n, 1], the first index at which the running sum of weights[n, V] passes u[n, 1] of
    the whole. An index of weight 0 is never drawn."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    # rounding must not push the target up to the total itself: no index passes that
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)


def _nucleus(logp: Tensor, top_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the smallest set of most likely tokens whose mass reaches top_p, renormalised (arXiv
    1904.09751)."""
    ordered, index = logp.sort(stable=True, dim=-1, descending=True)
    p = ordered.exp()
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
    place = _draw(p, u)
    return index.gather(1, place), ordered.gather(1, place) - p.sum(-1, keepdim=True).log()
