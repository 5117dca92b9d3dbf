"""What a completion should be, worked out without an engine: one forward over the whole row, nothing cached.

Role: the judge of everything the embedded engine returns. Neighbours: `schedules` plays, this judges.
Invariant: it uses the decoder's own forward and none of the engine's code but the hash that makes noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from rollwright.engine.embedded.sampler import noise_key, uniforms
from rollwright.model.attention import causal, positions
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder, Variant
from rollwright.types import Completion, Ints, PolicyVersion, Sampling

VOCAB, CONTEXT = 60, 160
TOLERANCE = 1e-5
"""Largest difference of a logprob, in nats."""
TIE = 1e-4
"""Greedy tokens are the judge's where the two best logits differ by more."""

Doubles = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Which decoder."""

    kv_heads: int = 2
    windows: tuple[int | None, ...] | None = None
    head_norm: bool = False
    """Is served without folding and replay."""
    bias: bool = False


@cache
def decoder(kind: Kind, seed: int) -> Decoder:
    """Two layers whose every token weighs in what comes next. Shared: not to be changed."""
    config = ModelConfig(
        dim=32, layers=2, heads=4, kv_heads=kind.kv_heads, ffn=48, context=CONTEXT, tied=False
    )
    made = Decoder(config, VOCAB, _variant(kind))
    generator = torch.Generator().manual_seed(seed)
    made.initialise(generator)
    with torch.no_grad():
        made.embed.weight.mul_(20)
        for weight in made.parameters():
            if weight.dim() < 2:  # norms' weights that are not 1, biases that are not 0
                weight.add_(torch.empty_like(weight).normal_(0, 0.1, generator=generator))
    return made


def copied(kind: Kind, seed: int) -> Decoder:
    """The same decoder, to be changed."""
    made = Decoder(decoder(kind, seed).config, VOCAB, _variant(kind))
    made.load_state_dict(decoder(kind, seed).state_dict())
    return made


def _variant(kind: Kind) -> Variant:
    return Variant(windows=kind.windows, head_norm=kind.head_norm, qkv_bias=kind.bias)


@torch.inference_mode()
def cold_logits(model: Decoder, tokens: Ints) -> Doubles:
    """float64[T, V]: what `model` says after each of int32[T] tokens."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    hidden = model.forward(ids, positions([len(ids)]), causal([len(ids)], model.shape))
    logits: Doubles = model.logits(hidden).double().numpy()
    return logits


def judge(
    models: Mapping[PolicyVersion, Decoder], prompt: Ints, sampling: Sampling, done: Completion
) -> tuple[float, int]:
    """Whether each token was drawn from its version's cold distribution with its own noise, and its logprob
    is that distribution's; gives the largest difference, and how many greedy tokens were near a tie.

    Raises:
        AssertionError: it was not.
    """
    covered = [at for span in done.spans for at in range(span.start, span.end)]
    assert covered == list(range(len(done.tokens))) and len(done.logprobs) == len(done.tokens), "spans"
    full = np.concatenate([prompt, done.tokens])
    key = np.full(len(done.tokens), noise_key(sampling.seed, done.request), np.uint64)
    where = np.arange(len(prompt) - 1, len(full) - 1)
    noise = uniforms(key, where).astype(np.float64).clip(2**-25, 1 - 2**-22)
    worst, ties = 0.0, 0
    for span in done.spans:
        logits = cold_logits(models[span.version], full)
        for at in range(span.start, span.end):
            gap, tied = _token(
                logits[where[at]], sampling, int(done.tokens[at]), float(done.logprobs[at]), noise[at]
            )
            assert gap <= TOLERANCE, f"token {at} of {done.request}: its logprob differs by {gap:.3g}"
            worst, ties = max(worst, gap), ties + tied
    return worst, ties


def _token(logits: Doubles, sampling: Sampling, token: int, logprob: float, u: float) -> tuple[float, int]:
    if sampling.temperature == 0:
        ordered = np.sort(logits)
        tied = ordered[-1] - ordered[-2] <= TIE
        assert tied or token == int(logits.argmax()), "another token is the likeliest"
        return abs(_log_softmax(logits)[token] - logprob), int(tied)
    logp = _log_softmax(logits / sampling.temperature)
    rank = np.argsort(-logp, kind="stable")
    found = [_drawn(logp, rank[:n], token, logprob, u) for n in _lengths(np.exp(logp[rank]), sampling)]
    return min(found), 0


def _drawn(logp: Doubles, kept: npt.NDArray[np.int64], token: int, logprob: float, u: float) -> float:
    """How far `logprob` is off, where `kept` are what may be drawn; infinity where `token` isn't what the
    noise `u` points at."""
    if token not in kept:
        return float("inf")
    p = np.zeros_like(logp)
    p[kept] = np.exp(logp[kept])
    total = p.sum()
    below = p[:token].sum() / total
    if not below - TOLERANCE <= u <= below + p[token] / total + TOLERANCE:
        return float("inf")
    return abs(float(logp[token] - np.log(total)) - logprob)


def _lengths(p: Doubles, sampling: Sampling) -> set[int]:
    """How many of the likeliest (float64[V], falling) may stay: several where an edge is within rounding."""
    sizes = {len(p) if not sampling.top_k else min(sampling.top_k, len(p))}
    if sampling.top_p < 1:
        cut = set()
        for size in sizes:
            sums = p[:size].cumsum()
            for near in (-TOLERANCE, 0, TOLERANCE):
                cut.add(min(int((sums < sampling.top_p * sums[-1] + near).sum()) + 1, size))
        sizes = cut
    if sampling.min_p > 0:
        floors = {int((p >= sampling.min_p * p[0] * (1 + near)).sum()) for near in (-TIE, 0, TIE)}
        sizes = {max(1, min(size, floor)) for size in sizes for floor in floors}
    return sizes


def _log_softmax(logits: Doubles) -> Doubles:
    top = logits.max()
    found: Doubles = logits - top - np.log(np.exp(logits - top).sum())
    return found
