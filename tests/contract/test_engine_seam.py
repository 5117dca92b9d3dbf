"""Every engine passes the suite of the engine seam."""

import dataclasses
from collections.abc import Awaitable, Callable

import pytest
import torch

from rollwright.clock import SystemClock
from rollwright.engine.config import EmbeddedConfig
from rollwright.events import NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.rollout.rounds import Rounds
from rollwright.testing.engines import CHECKS, Make, Subject
from rollwright.testing.scripted_engine import WEIGHTS, ScriptedEngine
from rollwright.types import PolicyVersion

VOCAB, CONTEXT = 40, 48
VERSION = PolicyVersion(run="suite")


def decoder(seed: int) -> Decoder:
    made = Decoder(ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=32, context=CONTEXT), VOCAB)
    made.initialise(torch.Generator().manual_seed(seed))
    return made


def embedded(**settings: int) -> Subject:
    engine = EmbeddedConfig(**settings).build(decoder(0), VERSION, SystemClock(), NullSink())
    return Subject(engine, VOCAB, CONTEXT, VERSION, dict(decoder(1).named_parameters()))


def counting(step: int) -> Callable[[tuple[int, ...]], tuple[list[int], list[float]]]:
    """Says (last + step), again and again: what it says after its own words is what it would have said
    anyway."""

    def script(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        tokens = [(prompt[-1] + step * i) % VOCAB for i in range(1, CONTEXT + 1)]
        return tokens, [-(token + step) / VOCAB for token in tokens]

    return script


def scripted() -> Subject:
    engine = ScriptedEngine(counting(1), version=VERSION, vocab=VOCAB, context=CONTEXT)
    return Subject(engine, VOCAB, CONTEXT, VERSION, {WEIGHTS: counting(3)})


def in_rounds() -> Subject:
    subject = embedded()
    return dataclasses.replace(subject, engine=Rounds(subject.engine))


MAKERS: dict[str, Make] = {
    "scripted": scripted,
    "embedded": embedded,
    "embedded, one row, small chunks, small cache": lambda: embedded(
        max_batch=1, kv_tokens=60, prefill_tokens=3
    ),
    "embedded, three rows, chunks of one": lambda: embedded(max_batch=3, prefill_tokens=1),
    "embedded, in rounds": in_rounds,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", MAKERS)
async def test_engine_keeps_the_contract(name: str, check: Callable[[Make], Awaitable[None]]) -> None:
    await check(MAKERS[name])
