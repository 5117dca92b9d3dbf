"""One forward over the tokens of a plan, and the draw of the next tokens.

Role: all tensor work of a step. Neighbours: the scheduler plans before and commits after it. Invariant: it
changes KV rows only at the planned tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rollwright.engine.embedded.attend import StepAttend
from rollwright.engine.embedded.batch import Batch
from rollwright.engine.embedded.kv import KV, Index
from rollwright.engine.embedded.plan import Plan
from rollwright.engine.embedded.sampler import Allowed, Narrowing, draw, uniforms
from rollwright.model.attention import causal, positions
from rollwright.model.base import Model
from rollwright.types import Floats, Ints


def advance(
    model: Model, kv: KV, batch: Batch, plan: Plan, last: Index
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Compute the plan's tokens and draw after those at plan indices `last` (int64[n]): n ids, n logprobs.

    Raises:
        EngineError: a logprob is not finite: the weights have diverged.
    """
    device = kv.device

    def put(index: Index) -> torch.Tensor:
        return torch.from_numpy(index).to(device)

    ids = batch.tokens[plan.rows, plan.positions].astype(np.int64)
    keep = put(last) if len(last) < len(ids) else None
    hidden = model.forward(put(ids), put(plan.positions), StepAttend(kv, plan, put), keep)
    if len(last) == 0:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    rows = plan.rows[last]
    how = Narrowing(batch.temperature[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
    noise = uniforms(batch.noise[rows], plan.positions[last])
    return draw(model.logits(hidden), how, noise, _allowed(batch, rows, model.vocab))


def _allowed(batch: Batch, rows: Index, vocab: int) -> Allowed | None:
    """What the constraints of `rows` let through; None where there are none."""
    matchers = [
        (i, request.matcher)
        for i in np.flatnonzero(batch.watched[rows]).tolist()
        if (request := batch.requests[rows[i]]) is not None and request.matcher is not None
    ]
    if not matchers:
        return None
    bits = np.zeros((len(matchers), -(-vocab // 32)), np.uint32)
    for out, (_, matcher) in zip(bits, matchers, strict=True):
        matcher.mask(out)
    return Allowed(np.array([i for i, _ in matchers], np.int64), bits)


@torch.inference_mode()
def score(model: Model, tokens: Ints, temperature: float) -> Floats:
    """float32[T-1] logprobs of int32[T] tokens, computed cold: without any cached KV."""
    device = next(weights for _, weights in model.named_parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    lengths = [len(ids) - 1]
    hidden = model.forward(ids[:-1], positions(lengths).to(device), causal(lengths, model.shape))
    logp = (model.logits(hidden) / temperature).log_softmax(-1)
    found: Floats = logp.gather(1, ids[1:, None]).squeeze(1).float().cpu().numpy()
    return found
