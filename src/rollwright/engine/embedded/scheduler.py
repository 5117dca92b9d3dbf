"""Which request runs when: admission, continuous batching, chunked prefill, retraction.

Role: one step at a time, over everything that waits and runs. Neighbours: `engine` submits and ends requests
and calls `run`; `histories` keeps their KV, `step` does the tensor work. Invariants: a request is waiting or
in one row, never both; a prefix being computed for one request is not computed again for its siblings;
long prompts lengthen a step by at most `stall` times what those who decode need, or by one token; the request
that came first among the highest priority is never retracted, so somebody always gets on.
"""

from __future__ import annotations

import numpy as np
import torch

from rollwright.clock import Clock
from rollwright.engine.base import InFlight
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.effort import Effort
from rollwright.engine.embedded.histories import SHARE, Histories
from rollwright.engine.embedded.kv import Index
from rollwright.engine.embedded.plan import Chunk, Plan, draw
from rollwright.engine.embedded.request import Request
from rollwright.engine.embedded.step import Stepper
from rollwright.engine.embedded.waiting import PATIENCE, Waiting
from rollwright.engine.pace import Pace
from rollwright.model.base import Model
from rollwright.model.folded import Folded, served
from rollwright.types import Chunk as Piece
from rollwright.types import Finish, Floats, PolicyVersion

SIBLING = 8
"""Tokens past the cached prefix that must agree for a request to wait for another's prefill instead of
repeating it."""


SHORT = 64
"""Longest rest of a prompt, in tokens, that is not cut for the sake of those who decode."""


class Scheduler:
    """Everything a step works on."""

    def __init__(self, model: Model, config: EmbeddedConfig, version: PolicyVersion, clock: Clock) -> None:
        weights = [parameter for _, parameter in model.named_parameters()]
        self.model, self._config, self._clock = served(model), config, clock
        self.waiting = Waiting()
        self.histories = Histories(self.model.shape, config, version, weights[0].device, weights[0].dtype)
        self.batch = self.histories.batch
        self._stepper = Stepper(self.model, self.histories.kv)
        self.pace = Pace()
        self._effort = Effort(model.shape, sum(w.numel() for w in weights))
        self._last: tuple[int, Plan | None] = (0, None)
        self.steps = self.prompt_tokens = self.cached_tokens = self.sampled_tokens = 0
        self.retracted = self.constrained = self.compliant = 0

    @property
    def version(self) -> PolicyVersion:
        """Of the weights."""
        return self.histories.version

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not len(self.waiting) and not len(self.batch)

    @property
    def longest(self) -> int:
        """Tokens of the longest history there is room for."""
        return max(self.histories.row_tokens, self.histories.radix.capacity)

    @torch.inference_mode()
    def run(self) -> None:
        """One step: admit, compute, sample, finish."""
        began, batch = self._clock.now(), self.batch
        plan = self._once_more()
        if plan is None:
            self._admit()
            self._spill()
            plan = self._plan()
        self._last = (batch.changes, plan)
        self.histories.reserve(plan.width, plan.reach)
        drawn, rows = None, plan.rows
        if plan.chunks:
            sizes = [chunk.end - chunk.start for chunk in plan.chunks]
            whole = [chunk.end == batch.length[chunk.row] for chunk in plan.chunks]
            ends = np.cumsum([plan.decoding, *sizes])[1:] - 1
            drawn = np.concatenate((np.arange(plan.decoding), ends[whole]))
            rows = plan.rows[drawn]
        tokens, logprobs = self._stepper.advance(batch, plan, drawn)
        batch.computed[plan.rows[: plan.decoding]] += 1
        for chunk in plan.chunks:
            batch.computed[chunk.row] = chunk.end
        now = self._clock.now()
        self._time(rows, now, now - began, plan.repeated)
        self._commit(rows, tokens, logprobs)
        self.steps += 1

    def _once_more(self) -> Plan | None:
        """The plan after the last one, where all decoded and nothing has changed since."""
        changes, plan = self._last
        if plan is None or not plan.alike or changes != self.batch.changes:
            return None
        if self._may_admit:
            return None
        return plan.next() if plan.reach < self.histories.row_tokens else None

    def _time(self, rows: Index, now: float, took: float, again: bool) -> None:
        """`rows` got their tokens `now`; in the step before too, where this is the same `again`."""
        gaps = now - self.batch.last[rows]
        self.pace.gaps(gaps if again else gaps[~np.isnan(gaps)])
        self.pace.step(took, len(rows))
        self.batch.last[rows] = now

    @property
    def _may_admit(self) -> bool:
        """Whether somebody waits for a row and may have one now."""
        if self.batch.full or not len(self.waiting):
            return False
        return not len(self.batch) or self.steps >= self.waiting.since + self._config.linger

    def add(self, request: Request) -> None:
        """Let it wait for a row."""
        request.came = self.steps
        self.waiting.add(request)

    def _admit(self) -> None:
        """Give rows to waiting requests as long as this step can begin their prompts."""
        if not self._may_admit:
            return
        batch = self.batch
        active = batch.active()
        missing = batch.length[active] - batch.computed[active]
        budget = self._config.prefill_tokens - int(missing[missing > 1].sum())
        for request in self.waiting.ordered(lambda r: self.histories.match(r)[1]):
            if batch.full:
                return
            if budget <= 0 and request.follows_another:
                continue
            _, cached = self.histories.match(request)
            request.follows_another = self._waits_for_sibling(request, cached)
            if budget <= 0 or request.follows_another:
                continue
            row = self.histories.admit(request, self._alone(request, cached))
            if row is None:
                if request.passed >= PATIENCE:
                    return  # whoever else came in would keep it out for ever
                continue
            self.waiting.passed_by(request)
            self.waiting.remove(request)
            computed = int(batch.computed[row])
            budget -= len(request.tokens) - computed
            if request.cached is None:
                request.cached = computed
                self.prompt_tokens += request.prompt
                self.cached_tokens += computed

    def _waits_for_sibling(self, request: Request, cached: int) -> bool:
        """Whether a running request is computing more of `request`'s prefix than is cached; what one has
        computed already is published for it."""
        batch, ids = self.batch, request.tokens
        if len(ids) - 1 - cached < SIBLING or not len(batch):
            return False
        rows = batch.active()
        rows = rows[(batch.base[rows] <= cached) & (batch.length[rows] >= cached + SIBLING)]
        alike = (batch.tokens[rows, cached : cached + SIBLING] == ids[cached : cached + SIBLING]).all(1)
        best, common = -1, 0
        for row in rows[alike].tolist():
            size = min(int(batch.length[row]), len(ids) - 1)
            differ = batch.tokens[row, :size] != ids[:size]
            size = int(differ.argmax()) if differ.any() else size
            if size > common:
                best, common = row, size
        if common < cached + SIBLING:
            return False
        computed = int(batch.computed[best])
        if computed < common and batch.length[best] - computed > 1:
            leader = batch.requests[best]
            assert leader is not None, f"row {best} is empty"
            leader.leads = True
            return True
        self.histories.publish(best, min(common, computed))
        return False

    def _alone(self, request: Request, cached: int) -> bool:
        """Whether no other waiting request begins with the first `cached` tokens of this one."""
        ids = request.tokens
        return not cached or not any(
            len(other.tokens) > cached
            and other.tokens[cached - 1] == ids[cached - 1]
            and np.array_equal(other.tokens[:cached], ids[:cached])
            for other in self.waiting
            if other is not request
        )

    def _spill(self) -> None:
        """Move the histories of rows that are full into the tree; where that is full too, put back whoever
        came last."""
        batch, histories, active = self.batch, self.histories, self.batch.active()
        limit = histories.row_tokens
        wanted = np.minimum(batch.length[active] - batch.computed[active], self._config.prefill_tokens)
        full = batch.computed[active] - batch.base[active] + wanted > limit
        for row in active[wanted > 1].tolist():
            request, computed = batch.requests[row], int(batch.computed[row])
            if request is not None and request.leads and computed - batch.base[row] >= SHARE:
                histories.publish(row, computed)  # so that its row needs not hold what others will share
        for row in active[full].tolist():
            while batch.length[row]:
                computed, used = int(batch.computed[row]), int(batch.computed[row] - batch.base[row])
                more = min(int(batch.length[row]) - computed, self._config.prefill_tokens, limit)
                if used + more <= limit or not used or histories.publish(row, computed):
                    break
                self._retract()

    def _retract(self) -> None:
        """Put the last come of the lowest priority back into the queue."""
        batch = self.batch
        rows = batch.active()
        row = int(rows[np.lexsort((-batch.order[rows], batch.priority[rows]))[0]])
        request = self.histories.leave(row)
        request.close_span(self.version)
        self.waiting.put_back([request])
        self.retracted += 1

    def _plan(self) -> Plan:
        """Every row that decodes; prompts by priority and age, up to what the step may cost. Short ones,
        which is what tools answer, are computed at once: who has one waits as much as who decodes."""
        batch, effort, active = self.batch, self._effort, self.batch.active()
        missing = batch.length[active] - batch.computed[active]
        decoding, behind = active[missing == 1], active[missing > 1]
        allowed = float("inf")
        if len(decoding):
            allowed = self._config.stall * effort.decode(len(decoding), int(batch.computed[decoding].sum()))
        chunks, budget, long = [], self._config.prefill_tokens, False
        for row in behind[np.lexsort((batch.order[behind], -batch.priority[behind]))].tolist():
            start = int(batch.computed[row])
            left = int(batch.length[row]) - start
            size = min(left, budget, self.histories.row_tokens - (start - int(batch.base[row])))
            node = batch.nodes[row]
            pieces = sum(1 for _ in node.up()) if node is not None else 0
            if allowed < float("inf") and left > SHORT:
                if allowed <= 0 and long:
                    continue
                size = min(size, effort.tokens(allowed, start, pieces))
            long |= left > SHORT
            chunks.append(Chunk(row, start, start + size))
            budget -= size
            allowed -= effort.prompt(size, start, pieces)
            if budget <= 0:
                break
        return draw(decoding, chunks, batch.computed, batch.base, batch.nodes)

    def _commit(self, rows: Index, tokens: Index, logprobs: Floats) -> None:
        """Write down what was sampled and end what is finished."""
        batch = self.batch
        at = batch.length[rows]
        batch.tokens[rows, at], batch.logprobs[rows, at] = tokens, logprobs
        batch.length[rows] = at + 1
        self.sampled_tokens += len(rows)
        stopped = (tokens[:, None] == batch.stops[rows]).any(1)
        ended = at + 1 >= batch.limit[rows]
        for i in batch.watched[rows].nonzero()[0].tolist():
            request = batch.requests[rows[i]]
            assert request is not None, f"row {rows[i]} is empty"
            stopped[i] |= request.follows(int(tokens[i]))
            if request.broken is not None:
                continue
            finish = Finish.STOP if stopped[i] else Finish.LENGTH if ended[i] else None
            if request.sink is not None:
                request.sink.put_nowait(self._piece(request, tokens[i : i + 1], logprobs[i : i + 1], finish))
        ended |= stopped
        if not ended.any():
            return
        self._last = (batch.changes, None)  # nobody keeps what a node held that may go now
        self._stepper.part()
        finished = rows[ended].tolist()
        for row, stop in zip(finished, stopped[ended].tolist(), strict=True):
            self._complete(self.histories.leave(row), Finish.STOP if stop else Finish.LENGTH)
        if not len(self.waiting):
            self.histories.compact()

    def _piece(self, request: Request, tokens: Index, logprobs: Floats, finish: Finish | None) -> Piece:
        return Piece(
            request=request.id,
            tokens=tokens.astype(np.int32),
            logprobs=logprobs.copy(),
            version=self.version,
            finish=finish,
        )

    def _complete(self, request: Request, finish: Finish) -> None:
        if request.broken is not None:
            request.fail(request.broken)
            return
        done = request.complete(finish, self.version)
        if done.compliant is not None:
            self.constrained += 1
            self.compliant += done.compliant

    def end(self, request: Request, finish: Finish | None) -> None:
        """Take `request` out wherever it is, keeping its KV in the prefix cache; with `finish` its caller
        gets what there is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.batch.requests:
            with torch.inference_mode():
                self.histories.leave(self.batch.requests.index(request))
        if finish is not None:
            self._complete(request, finish)

    def adopt(self, version: PolicyVersion, in_flight: InFlight) -> None:
        """The weights changed: forget all KV. Running requests go back to the head of the queue: with their
        tokens, to have their KV computed again under the new version, or without; or they end."""
        if isinstance(self.model, Folded):
            self.model.refresh()
        self._last = (0, None)
        old, running = self.version, self.histories.forget(version)
        for request in running:
            request.close_span(old)
        if in_flight is InFlight.CONTINUE:
            self.waiting.put_back(running)
            return
        again = []
        for request in [*running, *(r for r in self.waiting if len(r.tokens) > r.prompt)]:
            if request in self.waiting:
                self.waiting.remove(request)
            fresh = len(request.tokens) == request.prompt
            if fresh or (in_flight is InFlight.RESTART and request.sink is None):
                request.restart()
                again.append(request)
            else:
                self._complete(request, Finish.ABORT)
        self.waiting.put_back(again)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where rows, requests and cache disagree."""
        self.histories.check_integrity()
        assert not any(r in self.batch.requests for r in self.waiting), "a request waits and runs"
