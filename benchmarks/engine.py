"""How fast the embedded engine decodes: against a bare loop, `generate`, and continuous batching.

Models of 0.9 M and 5 M parameters with random weights, one thread, tokens per CPU second, contenders
interleaved round by round; a ratio is the median of the rounds', its spread from the least to the greatest.
Every contender samples at temperature 1; engine and loop record each token's logprob, transformers is spared
that.

Cases, each at batch 1, 16, 64 and 256 and again with `5M/` before the name (`floor/b1` is the 0.9 M model):
`floor/b…`: decoding behind 200-token prompts that are all different, over `floor.py`, a loop that can do
nothing else. `generate/b…`: the same over `generate`, with the cache and attention that are best at that
batch. Prompts are computed outside the clock on every side. `continuous-batching/b32`: ragged prompts
(50–400) and lengths (16–128), at most 32 at once, prompts included, over `generate`'s continuous batching.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from floor import Loop, best
from harness import Cases, parser
from models import Size, pair
from rivals import ContinuousBatching, Generate
from serving import CpuClock, Rates, engine, one_thread, prompts

from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.types import Ints, Sampling

PROMPT = 200
AFTER = 64
"""Tokens that requests may decode beyond the measured ones without ending."""
POLL = 0.005
"""Seconds between looks at the engine's counters."""
BATCHES = (1, 16, 64, 256)
UNIT = "× tokens per CPU second"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    sizes: tuple[Size, ...]
    rounds: int
    steps: int
    """Tokens decoded for each row."""
    requests: int
    """Of the ragged case."""
    tuned: bool
    """Whether `generate` tries its settings; else it takes those that were best elsewhere."""


FULL = Scale(("0.9M", "5M"), rounds=5, steps=64, requests=96, tuned=True)
QUICK = Scale(("0.9M",), rounds=2, steps=24, requests=32, tuned=False)


async def decoding(served: Engine, ids: list[Ints], steps: int, name: str, clock: CpuClock) -> float:
    """Tokens per second while all of `ids` decode together, over at least `steps` tokens of each. Tokens and
    seconds are read at the same moments, between steps, so it does not matter how far apart these are. The
    requests would go on and are aborted: what a request costs at its end (its KV goes into the prefix cache)
    is no decoding; whole requests are what the ragged case measures."""
    longer = Sampling(max_tokens=steps + AFTER, seed=1)
    start = (await served.health()).sampled_tokens
    tasks = [
        asyncio.create_task(served.generate(prompt, longer, request=f"{name}/{i}"))
        for i, prompt in enumerate(ids)
    ]

    async def reached(tokens: int) -> tuple[int, float]:
        while True:
            if (found := (await served.health()).sampled_tokens) >= tokens:
                return found, clock.now()
            await asyncio.sleep(POLL)

    before, began = await reached(start + len(ids))  # every prompt is computed, for they begin together
    after, ended = await reached(before + steps * len(ids))
    if any(task.done() for task in tasks):
        raise SystemExit(f"one of {len(ids)} requests ended while the others decoded: raise AFTER")
    await served.abort([f"{name}/{i}" for i in range(len(tasks))])
    await asyncio.gather(*tasks)
    return (after - before) / (ended - began)


@torch.inference_mode()
def bare(loop: Loop, steps: int, rng: np.random.Generator, clock: CpuClock) -> float:
    """Tokens per second of the bare loop."""
    uniforms = torch.from_numpy(rng.random((steps, loop.batch, 1), np.float32))
    began = clock.now()
    loop.decode(PROMPT, steps, uniforms)
    return steps * loop.batch / (clock.now() - began)


async def batches(cases: Cases, size: Size, scale: Scale, clock: CpuClock) -> None:
    """`floor/…` and `generate/…` of one model."""
    ours, theirs = pair(size)
    prefix = "" if size == "0.9M" else f"{size}/"
    for batch in BATCHES:
        rates = Rates()
        with torch.inference_mode():
            form = best(ours, batch, PROMPT, clock.now)
            loop = Loop(ours, batch, PROMPT + scale.steps, form)
            loop.ready(PROMPT, scale.steps)
        rival = Generate(theirs, clock)
        setting = rival.tune(batch, PROMPT) if scale.tuned else rival.usual(batch)
        print(f"{prefix}b{batch}: floor {form}, generate {setting}", file=sys.stderr, flush=True)
        served = engine(ours, served_by(batch, PROMPT + scale.steps + AFTER + 1))
        await served.start()
        rng = np.random.default_rng(batch)
        rounds = scale.rounds * (4 if batch <= 16 else 1)  # these are short
        for turn in range(rounds + 1):
            ids = prompts(rng, [PROMPT] * batch, ours.vocab)
            found = {
                "floor": bare(loop, scale.steps, rng, clock),
                "ours": await decoding(served, ids, scale.steps, str(turn), clock),
                "generate": rival.decode(ids, scale.steps),
            }
            if turn:  # the first warms up
                for who, rate in found.items():
                    rates.add(who, rate)
        await served.close()
        rates.compare(cases, f"{prefix}floor/b{batch}", "ours", "floor", UNIT)
        rates.compare(cases, f"{prefix}generate/b{batch}", "ours", "generate", UNIT)


def served_by(batch: int, length: int) -> EmbeddedConfig:
    """The engine for `batch` requests of `length` tokens. All prompts in one step, though that makes it long:
    so they begin together, and all decode behind the same number of tokens."""
    tokens = batch * length
    return EmbeddedConfig(max_batch=batch, kv_tokens=2 * tokens, prefill_tokens=max(512, tokens), stall=1e6)


async def ragged(cases: Cases, size: Size, scale: Scale, clock: CpuClock) -> None:
    """`continuous-batching/b32` of one model."""
    ours, theirs = pair(size)
    rng, rates = np.random.default_rng(32), Rates()
    served = engine(ours, EmbeddedConfig(max_batch=32, kv_tokens=2 * scale.requests * 600))
    await served.start()
    with ContinuousBatching(theirs, 32, clock) as rival:
        for turn in range(scale.rounds + 1):
            ids = prompts(rng, rng.integers(50, 401, scale.requests).tolist(), ours.vocab)
            lengths: list[int] = rng.integers(16, 129, scale.requests).tolist()
            rate, other = await whole(served, ids, lengths, str(turn), clock), rival.run(ids, lengths)
            if turn:
                rates.add("ours", rate)
                rates.add("theirs", other)
    await served.close()
    prefix = "" if size == "0.9M" else f"{size}/"
    rates.compare(cases, f"{prefix}continuous-batching/b32", "ours", "theirs", UNIT)


async def whole(served: Engine, ids: list[Ints], lengths: list[int], name: str, clock: CpuClock) -> float:
    """Tokens per second of requests from the first submitted to the last ended."""
    began = clock.now()
    await asyncio.gather(
        *(
            served.generate(prompt, Sampling(max_tokens=length), request=f"{name}/{i}")
            for i, (prompt, length) in enumerate(zip(ids, lengths, strict=True))
        )
    )
    return sum(lengths) / (clock.now() - began)


async def measured(cases: Cases, scale: Scale) -> None:
    """Every case."""
    clock = CpuClock()
    for size in scale.sizes:
        if size == "5M":  # five times the work for a round
            scale = replace(scale, rounds=min(scale.rounds, 3), requests=min(scale.requests, 48))
        await ragged(cases, size, scale, clock)
        await batches(cases, size, scale, clock)


def main() -> None:
    """Run it."""
    flags = parser("the embedded engine against a bare loop and transformers")
    flags.add_argument("--model", choices=FULL.sizes, help="only this one, kept under its own name")
    chosen = flags.parse_args()
    one_thread()
    scale = QUICK if chosen.quick else FULL
    if chosen.model:
        scale = replace(scale, sizes=(chosen.model,))
    cases = Cases(f"engine-{chosen.model}" if chosen.model else "engine")
    asyncio.run(measured(cases, scale))
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
