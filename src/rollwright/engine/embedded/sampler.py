"""From logits to tokens: constraint, temperature, top-k, top-p, min-p; the noise belongs to the request.

Role: draws the next tokens of a whole batch. Neighbours: `step` calls it. Invariants: the logprob returned
is that of the distribution really drawn from, after all of these (greedy draws from no distribution; its
logprob is that of the token at temperature 1 among the allowed ones); a token that its distribution excludes
is never drawn. The noise of a token depends only on (seed, request, position), and nothing here on the other
rows: a repeated request repeats whatever else is in the batch, up to float32 rounding of the logits.

Noise: SplitMix64's finaliser (Steele et al., OOPSLA 2014) as a counter-based hash, one uniform for each
token; drawn by inverse CDF.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollwright.engine.grammar.base import Bits
from rollwright.errors import EngineError

Floats32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

BLOCK = 64
"""Tokens summed together where the vocabulary is large: the draw finds the block, then the token in it."""
WHOLE = 16384
"""Vocabularies up to this size are summed token by token."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _40 = (np.uint64(bits) for bits in (30, 27, 31, 40))
_NONE = np.empty(0, np.int64)
_LOWEST, _HIGHEST = 2**-25, 1 - 2**-22
"""Noise is kept off the ends: what lies before the first token or after the last has no probability."""


def noise_key(seed: int, request: str) -> int:
    """64 bits that stand for a request: what `uniforms` is keyed by."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{request}".encode(), digest_size=8).digest(), "little")


def uniforms(keys: npt.NDArray[np.uint64], positions: Ids) -> Floats32:
    """float32[n] in [0, 1), 24 bits each, of uint64[n] keys and int64[n] positions."""
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    x ^= x >> _31
    noise: Floats32 = (x >> _40).astype(np.float32) * np.float32(2**-24)
    return noise


@dataclass(frozen=True)
class Narrowing:
    """How each of n rows is sampled. The same object may serve many steps: what follows from it is kept."""

    temperature: Floats32
    """float32[n]; 0 is greedy."""
    top_k: Ids
    """int64[n]; 0 is all."""
    top_p: Floats32
    """float32[n] in (0, 1]."""
    min_p: Floats32
    """float32[n] in [0, 1]."""

    @cached_property
    def greedy(self) -> npt.NDArray[np.bool_] | None:
        """bool[n] rows that take the most likely token; None where there are none."""
        return None if self.temperature.min() > 0 else self.temperature == 0

    @cached_property
    def scale(self) -> Floats32 | None:
        """float32[n] what logits are divided by; None where that is 1 everywhere."""
        if self.temperature.min() == 1 == self.temperature.max():
            return None
        return np.where(self.temperature == 0, np.float32(1), self.temperature)

    @cached_property
    def ranked(self) -> Ids:
        """int64[m] rows with a top-k or top-p."""
        if self.top_p.min() == 1 and not self.top_k.any():  # as most steps: a few operations less
            return _NONE
        return np.flatnonzero(((self.top_k > 0) | (self.top_p < 1)) & (self.temperature != 0))

    @cached_property
    def floored(self) -> Ids:
        """int64[m] rows with a min-p."""
        if not self.min_p.any():
            return _NONE
        return np.flatnonzero((self.min_p > 0) & (self.temperature != 0))


@dataclass(frozen=True)
class Allowed:
    """What the rows under a constraint may draw."""

    rows: Ids
    """int64[m], each once."""
    bits: Bits
    """uint32[m, ceil(V / 32)]."""


def draw(
    logits: Tensor, how: Narrowing, noise: Floats32, allowed: Allowed | None = None
) -> tuple[Ids, Floats32]:
    """Draw one token for each row: from the allowed ones, scaled by temperature, cut to the top k, then to
    the smallest set of most likely ones whose mass reaches top_p (arXiv 1904.09751), then to those at least
    min_p times as likely as the likeliest (arXiv 2407.01082), each renormalised. At a tie the lower id is
    the more likely one.

    Args:
        logits: float[n, V] on any device; left as they are.
        how: n ≥ 1 rows.
        noise: float32[n] uniforms in [0, 1).
        allowed: without it, every row may draw every token.

    Returns:
        int64[n] ids and float32[n] logprobs.

    Raises:
        EngineError: a row may draw nothing, or its logits are no numbers: the weights have diverged.
    """
    if allowed is not None and len(allowed.rows):
        _check(allowed, logits.shape[1])
        logits = _masked(logits, allowed)
    ids, chosen = _drawn(logits.float(), how, noise)
    drawn, logprobs = _back(ids, chosen.log())
    if not logprobs.min(initial=0.0) > -np.inf:  # also where one is not a number
        raise EngineError("a sampled token's logprob is not finite: the weights have diverged")
    return drawn, logprobs


def _check(allowed: Allowed, size: int) -> None:
    """Raises `EngineError` where a row may draw no token of the vocabulary."""
    last = allowed.bits[:, -1]
    if size % 32:
        last = last & np.uint32((1 << size % 32) - 1)
    possible = last.astype(bool) | allowed.bits[:, :-1].any(1)
    if not possible.all():
        row = int(allowed.rows[np.argmin(possible)])
        raise EngineError(f"row {row} may draw nothing: its constraint allows no token")


def _back(ids: Tensor, logprobs: Tensor) -> tuple[Ids, Floats32]:
    """int64[n, 1] ids and float32[n, 1] logprobs as arrays, in one transfer."""
    if ids.device.type == "cpu":
        return ids.squeeze(1).numpy(), logprobs.squeeze(1).numpy()
    both = torch.cat((ids.int(), logprobs.view(torch.int32)), 1).cpu().numpy()
    return both[:, 0].astype(np.int64), both[:, 1].copy().view(np.float32)


def _drawn(logits: Tensor, how: Narrowing, noise: Floats32) -> tuple[Tensor, Tensor]:
    """int64[n, 1] ids and float32[n, 1] probabilities of them."""
    device = logits.device
    if how.scale is not None:
        # the largest is 0 before it is divided, so that no temperature can make it infinite
        top = logits.amax(-1, keepdim=True)
        logits = (logits - top).div_(torch.from_numpy(how.scale).to(device).unsqueeze(1))
    p = logits.softmax(-1)
    if how.greedy is not None and how.greedy.all():
        ids = logits.argmax(-1, keepdim=True)
        return ids, p.gather(1, ids)
    if len(how.ranked):
        _rank(p, how)
    if len(how.floored):
        rows = torch.from_numpy(how.floored).to(device)
        _floor(p, rows, torch.from_numpy(how.min_p[how.floored]).to(device).unsqueeze(1))
    u = torch.from_numpy(noise).to(device).unsqueeze(1)
    ids = _inverse(p, u.clamp(_LOWEST, _HIGHEST))
    if how.greedy is not None:
        greedy = torch.from_numpy(how.greedy).to(device).unsqueeze(1)
        ids = torch.where(greedy, logits.argmax(-1, keepdim=True), ids)
    return ids, p.gather(1, ids)


def _masked(logits: Tensor, allowed: Allowed) -> Tensor:
    """A copy with −∞ for what may not be drawn."""
    octets = np.ascontiguousarray(allowed.bits, "<u4").view(np.uint8)
    barred = np.unpackbits(~octets, axis=1, bitorder="little")[:, : logits.shape[1]].view(np.bool_)
    if len(barred) < len(logits):
        every = np.zeros(tuple(logits.shape), np.bool_)
        every[allowed.rows] = barred
        barred = every
    elif (allowed.rows[1:] < allowed.rows[:-1]).any():
        barred = barred[np.argsort(allowed.rows)]
    return logits.masked_fill(torch.from_numpy(barred).to(logits.device), -torch.inf)


def _rank(p: Tensor, how: Narrowing) -> None:
    """Top-k, then top-p, in place. The smallest probability that stays is read off the sorted ones; which of
    several equal ones stay is decided by id."""
    device, size = p.device, p.shape[1]
    rows = torch.from_numpy(how.ranked).to(device)
    top_k = how.top_k[how.ranked]
    k = np.where((top_k > 0) & (top_k < size), top_k, size)
    limit = torch.from_numpy(k).to(device).unsqueeze(1)
    top_p = torch.from_numpy(how.top_p[how.ranked]).to(device).unsqueeze(1)
    q = p[rows]
    ordered = _ordered(q, int(k.max()))
    length = _length(ordered, limit, top_p, q)
    edge = ordered.gather(1, length - 1)
    stays, equal = q > edge, q == edge
    room = length - stays.sum(-1, keepdim=True)
    if device.type != "cpu" or bool((equal.sum(-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(-1, dtype=torch.int32) <= room
    q.masked_fill_(~(stays | equal), 0)
    p[rows] = q.div_(q.sum(-1, keepdim=True))


def _ordered(q: Tensor, most: int) -> Tensor:
    """float[m, K ≥ most] the largest of float[m, V], falling."""
    if q.device.type != "cpu":
        return q.topk(most, -1).values
    values, size = q.numpy(), q.shape[1]  # numpy sorts values ten times as fast
    if most < size // 4:
        values = np.partition(values, size - most, -1)[:, size - most :]
    return torch.from_numpy(np.sort(values, -1)[:, ::-1].copy())


def _length(ordered: Tensor, k: Tensor, top_p: Tensor, q: Tensor) -> Tensor:
    """int64[m, 1] how many of the most likely tokens stay; `ordered` float[m, K] are the first K of them."""
    sums = ordered.cumsum(-1)
    mass = torch.where(k < q.shape[1], sums.gather(1, k - 1), q.sum(-1, keepdim=True))
    # top_p = 1 is no cut, whatever rounding makes of the sums
    reach = torch.where(top_p < 1, top_p * mass, torch.inf)
    wanted = (sums - ordered < reach).sum(-1, keepdim=True)
    return torch.minimum(wanted, k).clamp_(min=1)


def _floor(p: Tensor, rows: Tensor, min_p: Tensor) -> None:
    """Min-p, in place."""
    q = p[rows]
    q.masked_fill_(q < min_p * q.amax(-1, keepdim=True), 0)
    p[rows] = q.div_(q.sum(-1, keepdim=True))


def _inverse(p: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: int64[n, 1], the first index at which the running sum of p[n, V] passes u[n, 1] of the
    whole. An index of probability 0 is never drawn."""
    n, size = p.shape
    if size <= WHOLE:
        ids = _first(p.cumsum(-1), u)
    else:
        full, rest = divmod(size, BLOCK)
        sums = p[:, : full * BLOCK].view(n, full, BLOCK).sum(-1)
        if rest:
            sums = torch.cat((sums, p[:, full * BLOCK :].sum(-1, keepdim=True)), 1)
        before = torch.nn.functional.pad(sums, (1, 0)).cumsum(-1)  # each block, and after all of them
        target = u * before[:, -1:]
        block = (torch.searchsorted(before, target, right=True) - 1).clamp_(max=sums.shape[1] - 1)
        at = block * BLOCK + torch.arange(BLOCK, device=p.device)
        if rest:
            inside = torch.where(at < size, p.gather(1, at.clamp(max=size - 1)), 0.0).cumsum(-1)
        else:
            inside = p.gather(1, at).cumsum(-1)
        # the block's sum and its running sum round differently: stay below what is really there
        left = torch.minimum(target - before.gather(1, block), inside[:, -1:] * _HIGHEST)
        ids = block * BLOCK + torch.searchsorted(inside, left, right=True)
        ids = ids.clamp_(max=size - 1)
    if p.device.type != "cpu":  # a parallel running sum may rise where nothing was added
        ids = torch.where(p.gather(1, ids) > 0, ids, p.argmax(-1, keepdim=True))
    return ids


def _first(sums: Tensor, u: Tensor) -> Tensor:
    """int64[n, 1]: where float[n, m] running sums pass u[n, 1] of their last."""
    return torch.searchsorted(sums, u * sums[:, -1:], right=True).clamp_(max=sums.shape[1] - 1)
