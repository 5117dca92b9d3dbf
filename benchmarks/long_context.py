"""Long histories: do they stay within the planned bytes, and do they leave decoding requests alone?

The model of 0.9 M parameters with a context of 40k, one thread. Cases: `planned`: a rollout of 8 turns behind
a history of 32k tokens (8k with `--quick`): the most bytes that the engine tells for KV, over what
`rollwright.engine.kv` plans for it; `rss` is how much the process's peak memory grew meanwhile, weights and
the scores of the long prompt included. `gap`: 16 requests decode, and a prompt of 8k or 32k tokens arrives
beside them (only 8k with `--quick`): the 99th percentile of the CPU seconds between two tokens of a decoding
request until the long prompt is computed, over that of the same tokens without it; median and spread over
rounds, the worse of the two lengths, each also as `gap/8k`, `gap/32k`.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
from dataclasses import dataclass, field

import numpy as np
from harness import Cases, parser
from models import decoder
from serving import CpuClock, engine, one_thread, prompts

from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.kv.embedded import expected
from rollwright.engine.kv.traffic import Traffic
from rollwright.model.decoder import Decoder
from rollwright.types import Ints, Sampling

CONTEXT, TURNS, SAMPLED, OBSERVED, DECODING = 40_960, 8, 16, 24, 16


FIRST = 32
"""Tokens of each decoding request before the long prompt arrives."""
EACH = 1024
"""Tokens of a decoding request; the next follows it."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    history: int
    prompts: tuple[int, ...]
    rounds: int


FULL, QUICK = Scale(32_768, (8192, 32_768), 3), Scale(8192, (8192,), 1)


async def planned(cases: Cases, model: Decoder, history: int) -> None:
    """One rollout with a long history, turn by turn."""
    traffic = Traffic(prompt=history, shared=0, turns=TURNS, sampled=SAMPLED, observed=OBSERVED, group=1)
    config = EmbeddedConfig(max_batch=1, kv_tokens=traffic.length)
    plan = expected(config, model.shape.kv_values, traffic, groups=1, requests=1)
    before, peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    served, rng = engine(model, config), np.random.default_rng(0)
    await served.start()
    (tokens,) = prompts(rng, [history], model.vocab)

    async def look() -> None:
        nonlocal peak
        while True:
            peak = max(peak, (await served.health()).kv_bytes)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    for turn in range(TURNS):
        done = await served.generate(tokens, Sampling(max_tokens=SAMPLED), request=f"{turn}", session="long")
        if turn and done.cached < len(tokens) - OBSERVED - SAMPLED:
            raise SystemExit(f"turn {turn} found only {done.cached} of {len(tokens)} tokens cached")
        tokens = np.concatenate((tokens, done.tokens, *prompts(rng, [OBSERVED], model.vocab)))
    peak = max(peak, (await served.health()).kv_bytes)
    looking.cancel()
    await served.close()
    cases.add("planned", peak, plan.bytes, ratio=peak / plan.bytes, unit="of the planned bytes")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    cases.add("rss", grown / 1024, plan.bytes / 2**20, ratio=grown / 1024, unit="MiB of peak memory grown")


@dataclass
class Heard:
    """When each token of one decoding request came."""

    times: list[float] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """It has its first `FIRST` tokens."""

    def gaps(self, first: int, last: int) -> list[float]:
        """Seconds between tokens `first` … `last`, of the same request each."""
        found = np.diff(self.times[first : last + 1])
        return found[~np.isnan(found)].tolist()


async def listen(
    served: Engine, prompt: Ints, tokens: float, name: str, heard: Heard, clock: CpuClock
) -> None:
    """Note when the tokens of requests come that follow each other until there are `tokens`."""
    while len(heard.times) < tokens:
        sampling, request = Sampling(max_tokens=EACH), f"{name}/{len(heard.times)}"
        async for _ in served.stream(prompt, sampling, request=request):
            heard.times.append(clock.now())
            if len(heard.times) == FIRST:
                heard.settled.set()
        heard.times.append(float("nan"))


async def beside(
    served: Engine, ids: list[Ints], long: Ints | None, tokens: float, name: str, clock: CpuClock
) -> tuple[list[Heard], int, int]:
    """16 requests decode at a time, and `long` arrives once each has 32 tokens; stops when it is computed.
    Without it, each of the 16 lines has `tokens`. Gives when tokens came, and from which to which of them the
    long prompt was there.
    """
    heard = [Heard() for _ in ids]
    tasks = [
        asyncio.create_task(listen(served, prompt, tokens, f"{name}/{i}", heard[i], clock))
        for i, prompt in enumerate(ids)
    ]
    await asyncio.gather(*(each.settled.wait() for each in heard))
    if long is not None:
        await served.generate(long, Sampling(max_tokens=1), request=f"{name}/long")
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=long is not None)
    return heard, FIRST, min(len(each.times) for each in heard) - 1


async def gap(model: Decoder, length: int, scale: Scale) -> list[tuple[float, float]]:
    """For each round the 99th percentile of the gaps with and without a prompt of `length`."""
    config = EmbeddedConfig(max_batch=DECODING + 1, kv_tokens=3 * CONTEXT)
    clock, found = CpuClock(), []
    served, rng = engine(model, config), np.random.default_rng(length)
    await served.start()
    for turn in range(scale.rounds):
        ids = prompts(rng, [200] * DECODING, model.vocab)
        (long,) = prompts(rng, [length], model.vocab)
        busy, first, last = await beside(served, ids, long, float("inf"), f"{turn}/with", clock)
        ids = prompts(rng, [200] * DECODING, model.vocab)
        alone, _, _ = await beside(served, ids, None, last + 1, f"{turn}/alone", clock)
        gaps = [[g for each in heard for g in each.gaps(first, last)] for heard in (busy, alone)]
        found.append((float(np.quantile(gaps[0], 0.99)), float(np.quantile(gaps[1], 0.99))))
    await served.close()
    return found


async def measured(cases: Cases, scale: Scale) -> None:
    """Every case."""
    model = decoder("0.9M", context=CONTEXT)
    await planned(cases, model, scale.history)
    worst: tuple[float, list[tuple[float, float]]] | None = None
    for length in scale.prompts:
        found = await gap(model, length, scale)
        middle = told(cases, f"gap/{length // 1024}k", found)
        if worst is None or middle > worst[0]:
            worst = (middle, found)
    if worst is not None:
        told(cases, "gap", worst[1])


def told(cases: Cases, case: str, found: list[tuple[float, float]]) -> float:
    """Add a gap; gives the median of its ratios."""
    ratios = [busy / alone for busy, alone in found]
    cases.add(
        case,
        statistics.median(busy for busy, _ in found),
        statistics.median(alone for _, alone in found),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        unit="× the p99 gap without the long prompt",
    )
    return statistics.median(ratios)


def main() -> None:
    """Run it."""
    chosen = parser("a long history within its plan, a long prompt beside decoding").parse_args()
    one_thread()
    cases = Cases("long_context")
    asyncio.run(measured(cases, QUICK if chosen.quick else FULL))
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
