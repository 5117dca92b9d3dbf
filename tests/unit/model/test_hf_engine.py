"""Hugging Face models served by the embedded engine: turns over cached history, as if each were computed
anew by transformers."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_hf import VOCAB, eager, tiny
from torch import Tensor

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.events import NullSink
from rollwright.model.decoder import Decoder
from rollwright.model.hf import HFModel, load
from rollwright.types import Ints, PolicyVersion, Sampling

pytestmark = pytest.mark.needs("transformers")

VERSION = PolicyVersion(run="hf")
LEAN = ("llama", "mistral", "qwen2, windows", "qwen3")
SERVED = (*LEAN, "gemma3_text", "gpt_neox", "gemma2", "granite", "opt")
SETTINGS: Mapping[str, Mapping[str, int]] = {
    "": {},
    "short rows, small chunks": {"row_tokens": 16, "prefill_tokens": 5, "max_batch": 2},
    "small cache": {"kv_tokens": 96, "prefill_tokens": 7, "max_batch": 3},
}
TURNS, SAID, TOLD = 3, 8, 6
MARGIN = 1e-4
"""Greedy ids have to be equal where the two best scores differ by more."""


def served(model: Any, **settings: int) -> Engine:
    return EmbeddedConfig(**settings).build(model, VERSION, SystemClock(), NullSink())


def logprobs(lm: Any, row: Ints) -> Tensor:
    """float32[T, vocab] of transformers' own forward over the whole row."""
    return eager(lm, [torch.from_numpy(row.astype(np.int64))]).log_softmax(-1)


async def rollout(engine: Engine, lm: Any, number: int, temperature: float) -> int:
    """Turns over a growing row, each compared with `lm`; how many tokens of the prompts were cached."""
    noise = np.random.default_rng(number)
    shared = np.random.default_rng(99).integers(3, VOCAB, 10)
    row: Ints = np.concatenate([shared, noise.integers(3, VOCAB, 4)]).astype(np.int32)
    cached = 0
    for turn in range(TURNS):
        sampling = Sampling(temperature=temperature, max_tokens=SAID, seed=turn)
        done = await engine.generate(row, sampling, request=f"{number}-{turn}", session=str(number))
        start, row = len(row), np.concatenate([row, done.tokens])
        expected = logprobs(lm, row)[start - 1 : -1]
        cached += done.cached
        if temperature == 0:
            best = expected.topk(2).values
            clear = (best[:, 0] - best[:, 1] > MARGIN).numpy()
            assert clear.sum() > SAID // 2
            assert np.array_equal(done.tokens[clear], expected.argmax(-1).numpy()[clear])
        else:
            own = expected.gather(1, torch.from_numpy(done.tokens.astype(np.int64))[:, None]).squeeze(1)
            assert np.abs(done.logprobs - own.numpy()).max() <= 1e-5
        row = np.concatenate([row, noise.integers(3, VOCAB, TOLD).astype(np.int32)])
    return cached


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", SERVED)
async def test_turns_over_cached_history_are_those_of_the_model_itself(
    name: str, settings: Mapping[str, int]
) -> None:
    engine, lm = served(HFModel(tiny(name)), **settings), tiny(name)
    await engine.start()
    try:
        cached = await asyncio.gather(*(rollout(engine, lm, i, i % 2) for i in range(4)))
    finally:
        await engine.close()
    assert sum(cached) > 0 or settings  # a small cache may have evicted it all


@pytest.mark.parametrize("name", LEAN)
async def test_the_faster_decoder_serves_the_same(name: str, tmp_path: Path) -> None:
    lm = tiny(name)
    lm.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, Decoder), "this family takes the slower way"
    engine = served(model, row_tokens=16, prefill_tokens=5)
    await engine.start()
    try:
        assert len(await asyncio.gather(*(rollout(engine, lm, i, 1.0) for i in range(4)))) == 4
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ["llama tied", "gemma3_text"])
async def test_new_weights_and_scores_are_those_of_the_model_itself(name: str) -> None:
    engine, other = served(HFModel(tiny(name))), tiny(name, seed=5)
    await engine.start()
    try:
        for lm in (tiny(name), other):
            row = np.random.default_rng(3).integers(3, VOCAB, 40).astype(np.int32)
            expected = logprobs(lm, row)[:-1].gather(1, torch.from_numpy(row[1:].astype(np.int64))[:, None])
            assert np.abs(await engine.score(row) - expected.squeeze(1).numpy()).max() <= 1e-5
            await rollout(engine, lm, 1, 1.0)
            await engine.update(dict(other.named_parameters()), VERSION.next())
    finally:
        await engine.close()
