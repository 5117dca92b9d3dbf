"""What shared prefixes are worth: a multi-turn tool workload against `generate` that prefills each turn.

The workload is kept in `workloads/tools.json`: 8 groups of 8 rollouts, one prompt a group, 4 turns of 16
sampled and 24 tool tokens, arrival times in decode steps. Prompts of 50, 200, 800 and 3,200 tokens; the model
of 0.9 M parameters, one thread. The rival takes what has arrived as one batch, by the batch size and order
(oldest first with padding, or the most of one length without) that are best for that prompt length.

Cases, for each prompt length: `speed/p…`: generated tokens per CPU second over the rival's, rounds
interleaved. `share-of-ideal/p…`: prompt tokens found cached, over what a perfect infinite trie finds in the
same requests in their order. `kv-saved/p…`: 1 − the peak of the bytes of all KV held (tokens × bytes of a
token) over the peak of what they would be if every rollout from its first request to its end held its whole
history alone; `kv-allocated/p…` is the same of the bytes allocated on our side, rounding and spare rows
included. The cache has room for two turns of each rollout: what has ended is evicted. Both sides work in
batches, ours by `engine.linger`, as long as a turn. With `--keep` also a picture, `baselines/prefix.svg`.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field

import numpy as np
from curve import draw
from harness import ROOT, Cases, parser
from models import pair
from rivals import CACHES, Generate
from serving import CpuClock, Rates, engine, one_thread
from workload import Asked, Play, Workload, ideal, load, plays

from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.model.decoder import Decoder
from rollwright.types import Sampling

LENGTHS = (50, 200, 800, 3200)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    groups: int
    rounds: int
    sizes: tuple[int, ...]
    """Batch sizes that the rival tries."""


FULL, QUICK = Scale(8, 3, (16, 32)), Scale(1, 1, (8,))
TUNED = 2
"""Groups of the workload that the rival is tuned on."""


@dataclass
class Seen:
    """One run of the workload through our engine."""

    workload: Workload
    seconds: float = 0.0
    cached: int = 0
    log: list[Asked] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    """Tokens of each rollout in flight."""
    peak_bytes: int = 0
    peak_tokens: int = 0
    peak_alone: int = 0
    """Most tokens at a time, were nothing shared."""


class Steps:
    """Time in decode steps: as many as the engine made, and what was jumped over while nothing ran."""

    def __init__(self, served: Engine, seen: Seen) -> None:
        self._served, self._seen = served, seen
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._jumped, self._began, self.now = 0, 0, 0
        self.active = 0
        """Rollouts whose request is with the engine, or is about to be."""

    async def until(self, step: int) -> None:
        """Wait; whoever comes back is active."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((step, woken))
        await woken

    async def run(self) -> None:
        """Look after every step, until cancelled."""
        while True:
            health = await self._served.health()
            seen = self._seen
            seen.peak_bytes = max(seen.peak_bytes, health.kv_bytes)
            seen.peak_tokens = max(seen.peak_tokens, health.kv_tokens)
            if not self.active and self._waiting:
                due = min(step for step, _ in self._waiting)
                self._jumped = max(self._jumped, due - health.steps)
            self.now = health.steps + self._jumped
            for entry in [entry for entry in self._waiting if entry[0] <= self.now]:
                self._waiting.remove(entry)
                self.active += 1
                entry[1].set_result(None)
            await asyncio.sleep(0)


async def rollout(play: Play, steps: Steps, served: Engine, seen: Seen, vocab: int) -> None:
    """One rollout: its turns, each when its tool has answered."""
    w = seen.workload
    sampling, turn, going = Sampling(max_tokens=w.sampled, seed=w.seed), 0, True
    while going:
        await steps.until(play.due)
        seen.log.append(Asked(play.history))
        seen.held[play.name] = len(play.history)
        seen.peak_alone = max(seen.peak_alone, sum(seen.held.values()))
        done = await served.generate(play.history, sampling, request=f"{play.name}/{turn}", session=play.name)
        steps.active -= 1
        seen.cached += done.cached
        seen.log.append(Asked(np.concatenate((play.history, done.tokens)), whole=True))
        going, turn = play.heard(done.tokens, steps.now, w.observed, vocab), turn + 1
        seen.held[play.name] = len(play.history)
        seen.peak_alone = max(seen.peak_alone, sum(seen.held.values()))
    del seen.held[play.name]


async def ours(decoder: Decoder, workload: Workload, clock: CpuClock) -> Seen:
    """The workload through a fresh engine."""
    # as the rival's batches are tuned: whoever comes waits until those who decode are through
    linger = workload.sampled + 1
    config = EmbeddedConfig(max_batch=64, kv_tokens=workload.live, linger=linger)
    served, seen = engine(decoder, config), Seen(workload)
    await served.start()
    steps = Steps(served, seen)
    began = clock.now()
    looking = asyncio.create_task(steps.run())
    await asyncio.gather(
        *(rollout(play, steps, served, seen, decoder.vocab) for play in plays(workload, decoder.vocab))
    )
    seen.seconds = clock.now() - began
    looking.cancel()
    await served.close()
    return seen


@dataclass(frozen=True)
class Policy:
    """How the rival makes a batch of what has arrived."""

    size: int
    padded: bool
    """Oldest first, padded; else the most of one length."""

    def choose(self, arrived: list[Play]) -> list[Play]:
        """The next batch."""
        if self.padded:
            return sorted(arrived, key=lambda play: play.due)[: self.size]
        lengths = [len(play.history) for play in arrived]
        common = max(lengths, key=lengths.count)
        return [play for play in arrived if len(play.history) == common][: self.size]


def theirs(rival: Generate, workload: Workload, policy: Policy, vocab: int, clock: CpuClock) -> float:
    """CPU seconds of the workload by `generate`; a call counts as as many steps as it samples tokens, and one
    for the prompts."""
    waiting, now, began = plays(workload, vocab), 0, clock.now()
    while waiting:
        arrived = [play for play in waiting if play.due <= now]
        if not arrived:
            now = min(play.due for play in waiting)
            continue
        batch = policy.choose(arrived)
        sampled = rival.generate([play.history for play in batch], workload.sampled)
        now += workload.sampled + 1
        for play, tokens in zip(batch, sampled, strict=True):
            if not play.heard(tokens, now, workload.observed, vocab):
                waiting.remove(play)
    return clock.now() - began


def tuned(rival: Generate, prompt: int, scale: Scale, vocab: int, clock: CpuClock) -> Policy:
    """The rival's best cache and policy, tried on a part of the workload; one size only is not tuned."""
    first = Policy(max(scale.sizes), padded=False)
    if len(scale.sizes) == 1:
        return first
    part = load(prompt, TUNED)
    caches: dict[str, float] = {}
    for rival.cache in CACHES:
        caches[rival.cache] = theirs(rival, part, first, vocab, clock)
    rival.cache = min(caches, key=lambda cache: caches[cache])
    found = {
        policy: theirs(rival, part, policy, vocab, clock)
        for policy in (Policy(size, padded) for size in scale.sizes for padded in (False, True))
    }
    return min(found, key=lambda policy: found[policy])


async def length(cases: Cases, prompt: int, scale: Scale, clock: CpuClock) -> float:
    """Every case of one prompt length; gives the speed's ratio."""
    decoder, model = pair("0.9M")
    rival, workload, rates = Generate(model, clock), load(prompt, scale.groups), Rates()
    policy = tuned(rival, prompt, scale, decoder.vocab, clock)
    print(f"p{prompt}: generate {policy}, {rival.cache}, {rival.attention}", file=sys.stderr, flush=True)
    for _ in range(scale.rounds):
        seen = await ours(decoder, workload, clock)
        rates.add("ours", workload.generated / seen.seconds)
        seconds = theirs(rival, workload, policy, decoder.vocab, clock)
        rates.add("theirs", workload.generated / seconds)
    ratio = rates.compare(cases, f"speed/p{prompt}", "ours", "theirs", "× generated tokens per CPU second")
    perfect = ideal(seen.log)
    cases.add(
        f"share-of-ideal/p{prompt}",
        seen.cached,
        perfect,
        ratio=seen.cached / perfect,
        unit="of the prompt tokens that a perfect trie finds",
    )
    saved(cases, prompt, seen, 4 * decoder.shape.kv_values)
    return ratio


def saved(cases: Cases, prompt: int, seen: Seen, token: int) -> None:
    """`kv-saved/…` and `kv-allocated/…`, `token` bytes a token."""
    alone = seen.peak_alone * token
    for name, peak in (("kv-saved", seen.peak_tokens * token), ("kv-allocated", seen.peak_bytes)):
        case = f"{name}/p{prompt}"
        cases.add(case, peak, alone, ratio=1 - peak / alone, unit="of the bytes without sharing")


async def measured(cases: Cases, scale: Scale) -> list[tuple[int, float]]:
    """Every case; gives the curve."""
    return [(prompt, await length(cases, prompt, scale, CpuClock())) for prompt in LENGTHS]


def main() -> None:
    """Run it."""
    chosen = parser("shared prefixes against computing every turn anew").parse_args()
    one_thread()
    cases = Cases("prefix")
    found = asyncio.run(measured(cases, QUICK if chosen.quick else FULL))
    if chosen.keep:
        draw(found, ROOT / "benchmarks" / "baselines" / "prefix.svg")
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
