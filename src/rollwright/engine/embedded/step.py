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
from rollwright.engine.embedded.plan import Levels, Plan
from rollwright.engine.embedded.replay import Replay, shared
from rollwright.engine.embedded.sampler import Allowed, Narrowing, draw, uniforms
from rollwright.model.attention import causal, positions
from rollwright.model.base import Model
from rollwright.model.folded import Folded
from rollwright.types import Floats, Ints

SLICE = 1024
"""Tokens whose logits are there at once when a text is scored."""
REPLAYS = 8
"""Batch sizes for which bound operations are kept."""
AHEAD = 32
"""Steps whose noise is made together."""


class Stepper:
    """Computes steps of `model` over `kv`."""

    def __init__(self, model: Model, kv: KV) -> None:
        self._model, self._kv = model, kv
        self._replays: dict[int, Replay] = {}  # by rows, the longest unused first
        self._shared: tuple[Levels, Replay] | None = None  # the one that reads these in place
        kv.replaced = self._forget
        self._how: tuple[int, Index, Narrowing] | None = None
        self._ahead: Floats = np.empty((0, 0), np.float32)

    def advance(self, batch: Batch, plan: Plan, drawn: Index | None) -> tuple[npt.NDArray[np.int64], Floats]:
        """Compute the plan's tokens and draw after those at plan indices `drawn` (int64[n]; None is all of
        them): n ids, n logprobs.

        Raises:
            EngineError: a logprob is not finite: the weights have diverged.
        """
        ids = batch.tokens[plan.rows, plan.positions].astype(np.int64)
        rows, positions = plan.rows, plan.positions
        logits = self._replayed(ids, plan) if plan.alike else None
        if logits is None:
            self._shared = None
            logits = self._computed(ids, plan, drawn)
        if drawn is not None:
            rows, positions = rows[drawn], positions[drawn]
        if not len(rows):
            return np.empty(0, np.int64), np.empty(0, np.float32)
        noise = self._noise(batch.noise[rows], positions, plan.repeated)
        return draw(logits, self._narrowing(batch, rows), noise, _allowed(batch, rows, self._model.vocab))

    def _noise(self, keys: npt.NDArray[np.uint64], positions: Index, again: bool) -> Floats:
        """float32[n] uniforms; those of `AHEAD` steps at once where steps repeat."""
        if not again:
            self._ahead = self._ahead[:0]
            return uniforms(keys, positions)
        if not len(self._ahead):
            self._ahead = uniforms(keys, positions + np.arange(AHEAD)[:, None])
        noise: Floats = self._ahead[0]
        self._ahead = self._ahead[1:]
        return noise

    def part(self) -> None:
        """Keep no shared prefix."""
        self._shared = None

    def _forget(self) -> None:
        self._replays.clear()
        self._shared = None

    def _replayed(self, ids: Index, plan: Plan) -> torch.Tensor | None:
        """The logits of a step in which all are alike; None where it is not worth while, or cannot be,
        replayed."""
        model = self._model
        if not isinstance(model, Folded) or any(model.shape.windows):
            return None
        replay = self._replay(model, plan)
        if replay is None:
            return None
        rows = replay.rows
        if rows == len(ids):
            return replay.logits(ids, plan.positions, plan.places, plan.repeated)
        # a free row computes something unused, and writes it where nothing is
        spread = np.zeros((3, rows), np.int64)
        spread[:, plan.rows] = ids, plan.positions, plan.places
        spread_ids, positions, places = spread
        return replay.logits(spread_ids, positions, places, plan.repeated)[torch.from_numpy(plan.rows)]

    def _replay(self, model: Folded, plan: Plan) -> Replay | None:
        rows = plan.width
        if plan.levels:
            if not plan.repeated:
                return None  # most likely it comes once: binding costs more than it saves
            if self._shared is None or self._shared[0] is not plan.levels:
                self._shared = (plan.levels, Replay(model, self._kv, rows, shared(plan)))
            return self._shared[1]
        replay = self._replays.pop(rows, None) or Replay(model, self._kv, rows)
        self._replays[rows] = replay
        if len(self._replays) > REPLAYS:
            self._replays.pop(next(iter(self._replays)))
        return replay

    def _computed(self, ids: Index, plan: Plan, drawn: Index | None) -> torch.Tensor:
        device = self._kv.device

        def put(index: Index) -> torch.Tensor:
            return torch.from_numpy(index).to(device)

        attend = StepAttend(self._kv, plan, put)
        keep = None if drawn is None else put(drawn)
        hidden = self._model.forward(put(ids), put(plan.positions), attend, keep)
        return self._model.logits(hidden)

    def _narrowing(self, batch: Batch, rows: Index) -> Narrowing:
        """How `rows` are sampled; kept as long as they are the same."""
        kept = self._how
        if kept is None or kept[0] != batch.changes or not (kept[1] is rows or np.array_equal(kept[1], rows)):
            how = Narrowing(batch.temperature[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
            self._how = kept = (batch.changes, rows, how)
        return kept[2]


def _allowed(batch: Batch, rows: Index, vocab: int) -> Allowed | None:
    """What the constraints of `rows` let through; None where there are none."""
    watched = batch.watched[rows]
    if not watched.any():
        return None
    held = [
        (i, request)
        for i in np.flatnonzero(watched).tolist()
        if (request := batch.requests[rows[i]]) is not None and request.matcher is not None
    ]
    if not held:
        return None
    bits = np.zeros((len(held), -(-vocab // 32)), np.uint32)
    for out, (_, request) in zip(bits, held, strict=True):
        request.mask(out, vocab)
    return Allowed(np.array([i for i, _ in held], np.int64), bits)


@torch.inference_mode()
def score(model: Model, tokens: Ints, temperature: float) -> Floats:
    """float32[T-1] logprobs of int32[T] tokens, computed cold: without any cached KV."""
    device = next(weights for _, weights in model.named_parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    lengths = [len(ids) - 1]
    hidden = model.forward(ids[:-1], positions(lengths).to(device), causal(lengths, model.shape))
    found = []
    for rows, asked in zip(torch.split(hidden, SLICE), torch.split(ids[1:, None], SLICE), strict=True):
        logp = (model.logits(rows) / temperature).log_softmax(-1)
        found.append(logp.gather(1, asked).squeeze(1).float().cpu())
    scores: Floats = torch.cat(found).numpy()
    return scores
