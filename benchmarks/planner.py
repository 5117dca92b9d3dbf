"""The KV planner's prediction against the bytes that the embedded engine measures.

Models of 0.9 M and 5 M parameters with random weights, three workloads: short independent requests, shared
groups over several turns, long prompts. Predicted is what `engine.kv.embedded.expected` says from the
settings and the traffic alone, before anything runs; measured is the most that `Health.kv_bytes` was while
the workload ran (it is asked after every step). Requests wait for a row most of the time, and the prefix
cache is too small for everything, as in a run.

Cases `measured/short`, `measured/groups`, `measured/long`, with `5M/` before the name of the larger model:
|predicted / measured − 1| in per cent.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import numpy as np
import torch
from harness import Cases, parser
from models import Size, decoder

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.kv.embedded import expected
from rollwright.engine.kv.traffic import Traffic
from rollwright.events import NullSink
from rollwright.types import Ints, PolicyVersion, Sampling

VERSION = PolicyVersion(run="bench")


@dataclass(frozen=True)
class Workload:
    """What is asked of the engine, and how it is set."""

    name: str
    traffic: Traffic
    groups: int
    concurrency: int
    """Rollouts at once; more than the engine's rows, so that some wait."""
    config: EmbeddedConfig


WORKLOADS = (
    Workload(
        "short",
        Traffic(prompt=50, sampled=32),
        groups=192,
        concurrency=32,
        config=EmbeddedConfig(max_batch=24, kv_tokens=4096),
    ),
    Workload(
        "groups",
        Traffic(prompt=200, shared=60, turns=4, sampled=16, observed=24, group=8),
        groups=16,
        concurrency=24,
        config=EmbeddedConfig(max_batch=16, kv_tokens=6144),
    ),
    Workload(
        "long",
        Traffic(prompt=3000, shared=500, turns=2, sampled=24, observed=200),
        groups=16,
        concurrency=4,
        config=EmbeddedConfig(max_batch=3, kv_tokens=16384, row_tokens=1024),
    ),
)


async def rollout(
    served: Engine, prompt: Ints, traffic: Traffic, name: str, rng: np.random.Generator, vocab: int
) -> None:
    """One rollout, turn by turn."""
    ids = prompt
    for turn in range(traffic.turns):
        sampling = Sampling(max_tokens=traffic.sampled, seed=int(rng.integers(2**31)))
        done = await served.generate(ids, sampling, request=f"{name}/{turn}", session=name)
        said = rng.integers(0, vocab, traffic.observed, dtype=np.int32)
        ids = np.concatenate((ids, done.tokens, said))


async def most(served: Engine, running: asyncio.Future[list[None]]) -> int:
    """The most bytes of KV that the engine said until `running` is done, asked after every step."""
    found = 0
    while not running.done():
        found = max(found, (await served.health()).kv_bytes)
        await asyncio.sleep(0)
    await running
    return found


async def measured(size: Size, load: Workload, groups: int) -> tuple[int, int]:
    """(predicted, measured) bytes of one workload of so many groups."""
    model, rng, traffic = decoder(size), np.random.default_rng(0), load.traffic
    predicted = expected(
        load.config, model.shape.kv_values, traffic, groups=groups, requests=load.concurrency
    ).bytes
    common = rng.integers(0, model.vocab, traffic.shared, dtype=np.int32)
    served = load.config.build(model, VERSION, SystemClock(), NullSink())
    gate = asyncio.Semaphore(load.concurrency)

    async def seat(prompt: Ints, name: str, seed: int) -> None:
        async with gate:
            own = np.random.default_rng(seed)
            await rollout(served, prompt, traffic, name, own, model.vocab)

    await served.start()
    try:
        seats = []
        for group in range(groups):
            own = rng.integers(0, model.vocab, traffic.prompt - traffic.shared, dtype=np.int32)
            prompt = np.concatenate((common, own))
            for member in range(traffic.group):
                number = group * traffic.group + member
                seats.append(seat(prompt, f"{group}/{member}", number + 1))
        found = await most(served, asyncio.ensure_future(asyncio.gather(*seats)))
    finally:
        await served.close()
    if not found:
        raise SystemExit("the engine measures no bytes of KV (Health.kv_bytes is 0): nothing to compare with")
    return predicted, found


def main() -> None:
    """Each workload on each model."""
    chosen = parser("predicted against measured KV bytes").parse_args()
    torch.set_num_threads(1)
    cases = Cases("planner")
    sizes: tuple[Size, ...] = ("0.9M",) if chosen.quick else ("0.9M", "5M")
    for size in sizes:
        for load in WORKLOADS:
            predicted, found = asyncio.run(
                measured(size, load, load.groups // 2 if chosen.quick else load.groups)
            )
            print(f"{size} {load.name}: predicted {predicted:,}, measured {found:,}", file=sys.stderr)
            cases.add(
                f"measured/{load.name}" if size == "0.9M" else f"{size}/measured/{load.name}",
                predicted,
                found,
                ratio=100 * abs(predicted / found - 1),
                unit="% off",
            )
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
