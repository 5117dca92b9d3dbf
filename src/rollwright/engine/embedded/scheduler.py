"""Which request runs when: admission, continuous batching, chunked prefill, preemption.

Role: keeps waiting requests, batch rows and prefix cache in step with each other. Neighbours: `engine`
submits and ends requests and calls `run`; `step` does the tensor work. Invariants: a request is waiting or
in one row, never both; KV in the cache is complete and of the current version when `run` returns; a prefix
being computed for one request is not computed again for its siblings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.attend import Plan
from rollwright.engine.embedded.batch import Batch
from rollwright.engine.embedded.kv import KV, Index
from rollwright.engine.embedded.radix import TOKEN, Radix
from rollwright.engine.embedded.request import Request
from rollwright.engine.embedded.step import advance
from rollwright.model.decoder import Decoder
from rollwright.types import Chunk, Finish, Floats, PolicyVersion

SIBLING = 8
"""Tokens past the cached prefix that must agree for a request to wait for another's prefill instead of
repeating it."""


class Scheduler:
    """Everything a step works on."""

    def __init__(self, decoder: Decoder, config: EmbeddedConfig, version: PolicyVersion) -> None:
        model = decoder.config
        self._decoder, self._config, self.version = decoder, config, version
        self.waiting: deque[Request] = deque()
        self.batch = Batch(config.max_batch, model.context)
        self.radix = Radix(config.kv_tokens)
        self._kv = KV(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.dim // model.heads,
            rows=config.max_batch,
            context=model.context,
        )
        self.steps = self.prompt_tokens = self.cached_tokens = self.sampled_tokens = 0

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not len(self.batch)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is held in rows or cache."""
        return self.radix.tokens + int(self.batch.computed[self.batch.active()].sum())

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV could be held."""
        return self.radix.capacity + self.batch.tokens.size

    @torch.inference_mode()
    def run(self) -> None:
        """One step: admit, compute, sample, finish."""
        self._admit()
        plan = self._plan()
        self._kv.reserve(int(plan.positions.max()) + 1)
        batch, n = self.batch, plan.decoding
        ends = np.cumsum([n, *(end - start for _, start, end in plan.chunks)])[1:] - 1
        ready = [i for i, (row, _, end) in zip(ends, plan.chunks, strict=True) if end == batch.length[row]]
        last = np.concatenate((np.arange(n), np.array(ready, np.int64)))
        tokens, logprobs = advance(self._decoder, self._kv, batch, plan, last)
        batch.computed[plan.rows[:n]] += 1
        for row, _, end in plan.chunks:
            batch.computed[row] = end
        self._commit(plan, plan.rows[last], tokens, logprobs)
        self.steps += 1

    def _admit(self) -> None:
        """Give rows to waiting requests, oldest first, as long as this step can begin their prompts."""
        batch, held = self.batch, []
        if batch.full or not self.waiting:
            return
        active = batch.active()
        behind = active[batch.length[active] - batch.computed[active] > 1]
        budget = self._config.prefill_tokens - int((batch.length[behind] - batch.computed[behind]).sum())
        begun = {
            batch.key(row, min(int(batch.computed[row]) + SIBLING, int(batch.length[row]))) for row in behind
        }
        while self.waiting and not batch.full and budget > 0:
            request = self.waiting.popleft()
            key = request.tokens.tobytes()
            # one token is left out: its output is what the next one is drawn from
            cached, blocks = self.radix.match(self.version, key[:-TOKEN])
            missing = len(request.tokens) - cached
            sibling = key[: TOKEN * (cached + SIBLING)]
            if missing >= SIBLING and sibling in begun:
                held.append(request)
                continue
            if missing > 1:
                begun.add(sibling)
            budget -= missing
            if request.cached is None:
                request.cached = cached
                self.prompt_tokens += request.prompt
                self.cached_tokens += cached
            self._kv.reserve(len(request.tokens))
            self._kv.load(batch.add(request, cached), blocks)
        self.waiting.extendleft(reversed(held))

    def _plan(self) -> Plan:
        """Every row that decodes, and prompts, oldest first, up to the budget."""
        batch, active = self.batch, self.batch.active()
        missing = batch.length[active] - batch.computed[active]
        decoding, behind = active[missing == 1], active[missing > 1]
        chunks, budget = [], self._config.prefill_tokens
        for row in behind[np.argsort(batch.order[behind])].tolist():
            start = int(batch.computed[row])
            end = min(int(batch.length[row]), start + budget)
            chunks.append((row, start, end))
            budget -= end - start
            if budget == 0:
                break
        rows, positions = [decoding], [batch.computed[decoding]]
        for row, start, end in chunks:
            rows.append(np.full(end - start, row))
            positions.append(np.arange(start, end))
        return Plan(np.concatenate(rows), np.concatenate(positions), len(decoding), tuple(chunks))

    def _commit(self, plan: Plan, rows: Index, tokens: Index, logprobs: Floats) -> None:
        """Write down what was sampled, cache what was computed, end what is finished."""
        batch = self.batch
        at = batch.length[rows]
        batch.tokens[rows, at], batch.logprobs[rows, at] = tokens, logprobs
        batch.length[rows] = at + 1
        self.sampled_tokens += len(rows)
        stopped = (tokens[:, None] == batch.stops[rows]).any(1)
        ended = stopped | (at + 1 >= batch.limit[rows])
        for i in np.flatnonzero(batch.streams[rows]):
            finish = None if not ended[i] else Finish.STOP if stopped[i] else Finish.LENGTH
            self._emit(int(rows[i]), tokens[i : i + 1], logprobs[i : i + 1], finish)
        finished = rows[ended].tolist()
        self._cache({*(row for row, _, _ in plan.chunks), *finished})
        for row, stop in zip(finished, stopped[ended].tolist(), strict=True):
            batch.take(row).complete(Finish.STOP if stop else Finish.LENGTH, self.version)
        if finished and not self.waiting:
            batch.compact(self._kv)

    def _emit(self, row: int, tokens: Index, logprobs: Floats, finish: Finish | None) -> None:
        request = self.batch.requests[row]
        assert request is not None and request.sink is not None, f"row {row} doesn't stream"
        chunk = Chunk(
            request=request.id,
            tokens=tokens.astype(np.int32),
            logprobs=logprobs.copy(),
            version=self.version,
            finish=finish,
        )
        request.sink.put_nowait(chunk)

    def _cache(self, rows: Iterable[int]) -> None:
        """Put the computed KV of `rows` into the prefix cache."""
        for row in rows:
            key = self.batch.key(row, int(self.batch.computed[row]))
            self.radix.insert(self.version, key, partial(self._kv.read, row))

    def end(self, request: Request, finish: Finish | None) -> None:
        """Take `request` out wherever it is, keeping its KV in the prefix cache; with `finish` its caller
        gets what there is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.batch.requests:
            row = self.batch.requests.index(request)
            with torch.inference_mode():
                self._cache([row])
            self.batch.take(row)
        if finish is not None:
            request.complete(finish, self.version)

    def adopt(self, version: PolicyVersion) -> None:
        """The weights changed: forget all KV. Running requests go back to the head of the queue with their
        tokens, to have their KV computed again under the new version; a new span begins."""
        rows = self.batch.active()
        running = [self.batch.take(row) for row in rows[np.argsort(self.batch.order[rows])].tolist()]
        for request in running:
            request.close_span(self.version)
        self.waiting.extendleft(reversed(running))
        self.radix.clear()
        self.version = version

    def check_integrity(self) -> None:
        """Raises `AssertionError` where rows, requests and cache disagree."""
        self.radix.check_integrity()
        active = set(self.batch.active().tolist())
        assert active == {i for i, r in enumerate(self.batch.requests) if r is not None}, "rows and requests"
        assert len(active) == len(self.batch), "free rows"
        assert not any(r in self.batch.requests for r in self.waiting), "a request waits and runs"
