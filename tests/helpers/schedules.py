"""Random lives of an embedded engine: groups, turns, forks, aborts, cancels, pauses, updates, small memory.

Role: plays one from a seed, has every completion judged and the engine's books checked after every step.
Neighbours: `cold` judges. Invariant: a seed gives the same schedule wherever it is played; nothing in it
looks at a clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from cold import CONTEXT, VOCAB, Kind, copied, decoder, judge

from rollwright.clock import SystemClock
from rollwright.engine.base import InFlight, PauseMode
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.errors import ContextOverflow
from rollwright.events import ListSink
from rollwright.model.base import Vocabulary
from rollwright.types import Completion, Finish, Ints, PolicyVersion, Sampling, VersionSpan

FIRST = PolicyVersion(run="schedule")
WORDS = Vocabulary(pieces=tuple(b"%c" % (97 + i % 7) for i in range(VOCAB)), control={})
SEEDS = 3
"""Sets of weights that updates go through."""

KINDS = (
    Kind(),
    Kind(),
    Kind(kv_heads=1),
    Kind(kv_heads=4, bias=True),
    Kind(windows=(None, 6)),
    Kind(kv_heads=1, windows=(9, 17)),
    Kind(kv_heads=4, windows=(1, None)),
    Kind(head_norm=True),
)

MECHANISMS = {
    "admitted": "histories.admit",
    "published": "histories.publish",
    "taken": "histories.radix.take",
    "split": "histories.radix._split",
    "trimmed": "histories.radix.trim",
    "joined": "histories.radix.join",
    "promoted": "histories.radix._promote",
    "demoted": "histories.radix._demote",
    "dropped": "histories.radix._drop",
    "retracted": "_retract",
    "compacted rows": "histories.kv.move",
    "resized": "histories.kv._resize",
    "put back": "waiting.put_back",
}
"""What must have happened in enough schedules, and the method that does it."""


@dataclass(frozen=True)
class Settings:
    """An engine as small as it may be."""

    kind: Kind
    share: int
    """Shortest prefix, in tokens, that is read in place."""
    small: int
    """Scores up to which a chunk is computed in batched products."""
    config: EmbeddedConfig


def settings(rng: np.random.Generator) -> Settings:
    """Some engine."""
    config = EmbeddedConfig(
        max_batch=int(rng.choice([1, 2, 3, 4, 6, 8])),
        row_tokens=int(rng.choice([16, 16, 24, 40, 1024, 1024])),
        kv_tokens=int(rng.choice([1, 60, 70, 90, 120, 500])),
        host_tokens=int(rng.choice([0, 20, 100, 600])),
        prefill_tokens=int(rng.choice([1, 3, 8, 30, 512])),
        stall=float(rng.choice([0.01, 0.5, 2.0, 50.0])),
    )
    if max(min(config.row_tokens, CONTEXT), config.kv_tokens) < 60:
        config = config.model_copy(update={"row_tokens": 80})
    kind = KINDS[int(rng.integers(len(KINDS)))]
    return Settings(kind, int(rng.choice([1, 4, 12, 64, 64, 64])), int(rng.choice([0, 300, 1 << 15])), config)


@dataclass
class Play:
    """One schedule under way."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0

    async def run(self, tune: Callable[[Settings], None]) -> None:
        """Play it to its end; `tune` sets what is no configuration.

        Raises:
            AssertionError: a completion is wrong, or the engine lost something.
        """
        rng = np.random.default_rng(self.seed)
        self._settings = chosen = settings(rng)
        tune(chosen)
        self._version, self._models = FIRST, {FIRST: decoder(chosen.kind, 0)}
        self.engine = EmbeddedEngine(
            copied(chosen.kind, 0), chosen.config, FIRST, SystemClock(), ListSink(), vocabulary=WORDS
        )
        self._watch()
        async with asyncio.timeout(60):
            await self.engine.start()
            members = [
                self._member(g, i)
                for g in range(int(rng.integers(1, 4)))
                for i in range(int(rng.integers(1, 5)))
            ]
            trouble = asyncio.create_task(self._trouble())
            await asyncio.gather(*members)
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)
            await self._nothing_is_left()
            await self.engine.close()

    def _watch(self) -> None:
        """Count what happens inside, and check the books after each step."""
        scheduler: Any = self.engine._scheduler
        for name, path in MECHANISMS.items():
            *owners, method = path.split(".")
            owner = scheduler
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, method, self._counted(name, getattr(owner, method)))
        stepper, run = scheduler._stepper, scheduler.run
        stepper._replayed = self._counted("replayed", stepper._replayed)
        stepper._computed = self._counted("computed", stepper._computed)

        advance, plans = stepper.advance, []

        def planned(batch: Any, plan: Any, drawn: Any) -> Any:
            plans[:] = [plan]
            return advance(batch, plan, drawn)

        stepper.advance = planned

        def checked() -> None:
            run()
            scheduler.check_integrity()
            plan = plans[0]
            self.counts["steps"] += 1
            self.counts["read in place"] += bool(plan.levels)
            self.counts["read in place by several"] += any(
                len(set(plan.rows[segment.tokens])) > 1 for level in plan.levels for segment in level
            )
            self.counts["several levels"] += len(plan.levels) > 1
            self.counts["prompts beside decoding"] += bool(plan.decoding and plan.chunks)
            self.counts["fused chunks"] += bool(plan.chunks) and not self._settings.small
            self.counts["prompts cut"] += any(
                chunk.end < scheduler.batch.length[chunk.row] - 1 for chunk in plan.chunks
            )

        scheduler.run = checked

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            found = method(*given, **named)
            self.counts[name] += found is not None or not name.startswith(("admitted", "replayed"))
            return found

        return counted

    async def _member(self, group: int, number: int) -> None:
        """One rollout: turns over a growing history that is cut back now and then."""
        rng = np.random.default_rng((self.seed, group, number))
        shared = np.random.default_rng((self.seed, group))
        history = np.concatenate([np.arange(5), shared.integers(0, VOCAB, int(shared.integers(1, 45)))])
        history = history.astype(np.int32)
        for turn in range(int(rng.integers(1, 5))):
            for _ in range(int(rng.choice([0, 0, 2, 15, 40]))):
                await asyncio.sleep(0)
            if turn and rng.random() < 0.25:
                history = history[: int(rng.integers(1, len(history) + 1))]
                self.counts["forked"] += 1
            done = await self._turn(history, f"{group}/{number}/{turn}", rng)
            if done is None:
                return
            told = rng.integers(0, VOCAB, int(rng.integers(0, 12))).astype(np.int32)
            history = np.concatenate([history, done.tokens, told])

    async def _turn(self, history: Ints, name: str, rng: np.random.Generator) -> Completion | None:
        sampling, priority = _sampling(rng), int(rng.choice([0, 0, 0, 1, -1]))
        streamed, fate = rng.random() < 0.3, rng.choice(["", "", "", "", "abort", "cancel"])
        say = self._streamed if streamed else self._generated
        task = asyncio.create_task(say(history, sampling, name, priority))
        if fate:
            for _ in range(int(rng.choice([0, 1, 3, 10, 40]))):
                await asyncio.sleep(0)
            if fate == "cancel":
                task.cancel()
            await self.engine.abort([name])
        scheduler = self.engine._scheduler
        if len(history) >= min(CONTEXT, scheduler.longest):
            found = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(found, ContextOverflow | asyncio.CancelledError), f"too long, but {found!r}"
            self.counts["refused"] += 1
            return None
        try:
            done = await task
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            return None
        gap, ties = judge(self._models, history, sampling, done)
        self.worst = max(self.worst, gap)
        self._check_end(history, sampling, done)
        self.counts.update(["completions", done.finish.value], ties=ties, tokens=len(done.tokens))
        self.counts["several versions"] += len(done.spans) > 1
        self.counts["cached"] += done.cached > 0
        return done

    def _check_end(self, history: Ints, sampling: Sampling, done: Completion) -> None:
        """Whether it ended where it says, and not before."""
        said = done.tokens.tolist()
        spelled = [b"".join(WORDS.pieces[id] for id in said[:end]).decode() for end in range(len(said) + 1)]
        ends = [
            i
            for i, (before, after) in enumerate(pairwise(spelled))
            if said[i] in sampling.stop
            or any(text in after and text not in before for text in sampling.stop_text)
        ]
        longest = min(sampling.max_tokens, CONTEXT - len(history))
        longest = min(longest, self.engine._scheduler.longest - len(history))
        assert ends in ([], [len(said) - 1]), f"{done.request} went on after a stop"
        if done.finish is Finish.STOP:
            assert ends, f"{done.request} stopped without a stop"
        elif done.finish is Finish.LENGTH:
            assert len(said) == longest and not ends, f"{done.request} has {len(said)} of {longest} tokens"
        assert len(said) <= longest

    async def _generated(self, history: Ints, sampling: Sampling, name: str, priority: int) -> Completion:
        return await self.engine.generate(history, sampling, request=name, priority=priority)

    async def _streamed(self, history: Ints, sampling: Sampling, name: str, priority: int) -> Completion:
        chunks = [
            chunk async for chunk in self.engine.stream(history, sampling, request=name, priority=priority)
        ]
        assert [chunk.finish is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
        finish = chunks[-1].finish
        assert finish is not None, "a stream ends with its finish"
        self.counts["streamed"] += 1
        versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
        return Completion(
            request=name,
            tokens=np.concatenate([chunk.tokens for chunk in chunks]),
            logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
            spans=tuple(VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions)),
            finish=finish,
        )

    async def _trouble(self) -> None:
        """Pauses and new weights, now and then."""
        rng = np.random.default_rng((self.seed, 99))
        while True:
            for _ in range(int(rng.integers(5, 60))):
                await asyncio.sleep(0)
            what = rng.choice(["keep", "keep", "update", "update while paused", "abort all", "wait"])
            self.counts[str(what)] += 1
            if what in ("keep", "update while paused"):
                await self.engine.pause(PauseMode.KEEP)
                for _ in range(int(rng.integers(0, 9))):
                    await asyncio.sleep(0)
            elif what == "abort all":
                await self.engine.pause(PauseMode.ABORT)
            elif what == "wait":
                await self.engine.pause()
            if what.startswith("update"):
                mode = list(InFlight)[int(rng.integers(3))]
                self.counts[f"update {mode.value}"] += len(self.engine._scheduler.batch) > 0
                self._version = self._version.next()
                weights = decoder(self._settings.kind, self._version.step % SEEDS)
                self._models[self._version] = weights
                await self.engine.update(dict(weights.named_parameters()), self._version, None, mode)
            await self.engine.resume()

    async def _nothing_is_left(self) -> None:
        """Nobody runs, waits or reads; the memory told is the memory there is."""
        self.engine.check_integrity()
        for _ in range(3):
            await asyncio.sleep(0)
        health, histories = await self.engine.health(), self.engine._scheduler.histories
        assert health.running == health.waiting == 0 and not self.engine._flying
        assert histories.radix.locked == 0 and not histories.batch.active().size
        assert health.kv_tokens == histories.radix.tokens <= self._settings.config.kv_tokens
        assert health.host_tokens <= self._settings.config.host_tokens


def _sampling(rng: np.random.Generator) -> Sampling:
    narrow = rng.choice(["", "", "top_k", "top_p", "min_p", "both"])
    return Sampling(
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1.0, 1.6])),
        top_k=int(rng.integers(1, 20)) if narrow in ("top_k", "both") else 0,
        top_p=float(rng.uniform(0.2, 0.95)) if narrow == "top_p" else 1.0,
        min_p=float(rng.uniform(0.01, 0.5)) if narrow in ("min_p", "both") else 0.0,
        max_tokens=int(rng.choice([1, 3, 10, 25, 60, 90])),
        stop=tuple(rng.integers(0, VOCAB, int(rng.integers(0, 2))).tolist()),
        stop_text=("abc", "fga", "dd")[: int(rng.choice([0, 0, 0, 1, 3]))],
        seed=int(rng.integers(3)),
    )
