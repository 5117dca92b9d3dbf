"""One forward over the tokens of a plan, and the draw of the next tokens.

Role: all tensor work of a step. Neighbours: the scheduler plans before and commits after it. Invariant: it
changes KV rows only at the planned tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rollwright.engine.embedded.attend import Plan, RowAttend
from rollwright.engine.embedded.batch import Batch
from rollwright.engine.embedded.kv import KV, Index
from rollwright.engine.embedded.sampler import sample, uniforms
from rollwright.errors import EngineError
from rollwright.model.attention import causal, positions
from rollwright.model.decoder import Decoder
from rollwright.types import Floats, Ints


def advance(
    decoder: Decoder, kv: KV, batch: Batch, plan: Plan, last: Index
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Compute the plan's tokens and draw after those at plan indices `last` (int64[n]): n ids, n logprobs.

    Raises:
        EngineError: a logprob is not finite: the weights have diverged.
    """
    ids = batch.tokens[plan.rows, plan.positions].astype(np.int64)
    keep = torch.from_numpy(last) if len(last) < len(ids) else None
    attend = RowAttend(kv, plan, decoder.config.heads)
    hidden = decoder.forward(torch.from_numpy(ids), torch.from_numpy(plan.positions), attend, keep)
    if len(last) == 0:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    rows = plan.rows[last]
    tokens, logprobs = sample(
        decoder.logits(hidden),
        batch.temperature[rows],
        batch.top_p[rows],
        uniforms(batch.noise[rows], plan.positions[last]),
    )
    if not np.isfinite(logprobs).all():
        raise EngineError("a sampled token's logprob is not finite: the weights have diverged")
    return tokens, logprobs


@torch.inference_mode()
def score(decoder: Decoder, tokens: Ints, temperature: float) -> Floats:
    """float32[T-1] logprobs of int32[T] tokens, computed cold: without any cached KV."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    lengths = [len(ids) - 1]
    hidden = decoder.forward(ids[:-1], positions(lengths), causal(lengths))
    logp = (decoder.logits(hidden) / temperature).log_softmax(-1)
    found: Floats = logp.gather(1, ids[1:, None]).squeeze(1).numpy()
    return found
