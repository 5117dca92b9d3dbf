"""A constraint holds whatever happens to its request: put back, restarted, under new weights, cut off."""

import asyncio
import re

import numpy as np
import pytest
import torch

from rollwright.clock import SystemClock
from rollwright.engine.base import InFlight
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.events import NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.testing.engines import sampled
from rollwright.types import (
    Completion,
    Constraint,
    ConstraintKind,
    Finish,
    Ints,
    PolicyVersion,
    Sampling,
)

pytestmark = pytest.mark.needs("grammar")

TOKENIZER = PieceTokenizer(["ab", "ba", "abc"], ["<end>"])
VOCABULARY = TOKENIZER.vocabulary()
VOCAB, END = len(VOCABULARY.pieces), TOKENIZER.control("<end>")
VERSION = PolicyVersion(run="constrained")
WORD = r"[abc]{60}(xy|z)"


def decoder(seed: int) -> Decoder:
    made = Decoder(ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, context=160), VOCAB)
    made.initialise(torch.Generator().manual_seed(seed))
    return made


def engine(**settings: int) -> EmbeddedEngine:
    config = EmbeddedConfig(**settings)
    return EmbeddedEngine(decoder(0), config, VERSION, SystemClock(), NullSink(), vocabulary=VOCABULARY)


def sampling(source: str = WORD, **more: int) -> Sampling:
    constraint = Constraint(kind=ConstraintKind.REGEX, source=source)
    return Sampling(max_tokens=more.get("max_tokens", 90), stop=(END,), constraint=constraint)


def ids(seed: int, length: int = 20) -> Ints:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def text(done: Completion) -> str:
    return b"".join(VOCABULARY.pieces[id] for id in done.tokens.tolist() if id != END).decode()


async def test_requests_that_are_put_back_go_on_in_their_word() -> None:
    spoken = []
    for settings in ({}, {"max_batch": 4, "row_tokens": 16, "kv_tokens": 130, "prefill_tokens": 9}):
        served = engine(**settings)
        await served.start()
        done = await asyncio.gather(*(served.generate(ids(i), sampling(), request=str(i)) for i in range(6)))
        health = await served.health()
        served.check_integrity()
        await served.close()
        assert all(re.fullmatch(WORD, text(each)) and each.compliant for each in done)
        assert (health.constrained, health.compliant) == (6, 6)
        assert bool(health.retracted) == bool(settings), "memory was not short"
        spoken.append([each.tokens.tolist() for each in done])
    assert spoken[0] == spoken[1], "what was put back went on otherwise"


@pytest.mark.parametrize("mode", list(InFlight))
async def test_new_weights_restart_or_go_on_with_the_word(mode: InFlight) -> None:
    served, fresh = engine(), engine()
    await served.start()
    await fresh.start()
    jobs = [asyncio.create_task(served.generate(ids(i), sampling(), request=str(i))) for i in range(4)]
    await sampled(served, 40)
    weights = {name: each.detach().clone() for name, each in decoder(1).named_parameters()}
    await served.update(weights, VERSION.next(), None, mode)
    await fresh.update(weights, VERSION.next())
    done = await asyncio.gather(*jobs)
    health = await served.health()
    for i, each in enumerate(done):
        versions = [span.version for span in each.spans]
        if mode is InFlight.STOP:
            assert each.finish is Finish.ABORT and each.compliant is False and len(each.tokens)
            assert versions == [VERSION] and re.fullmatch("[abc]{1,60}", text(each))
            continue
        assert re.fullmatch(WORD, text(each)) and each.compliant
        if mode is InFlight.CONTINUE:
            assert versions == [VERSION, VERSION.next()]
        else:
            again = await fresh.generate(ids(i), sampling(), request=str(i))
            assert versions == [VERSION.next()] and again.tokens.tolist() == each.tokens.tolist()
    assert (health.constrained, health.compliant) == (4, 0 if mode is InFlight.STOP else 4)
    await served.close()
    await fresh.close()


async def test_cut_off_in_mid_word_is_not_compliant() -> None:
    served = engine()
    await served.start()
    job = asyncio.create_task(served.generate(ids(0), sampling(), request="a"))
    await sampled(served, 10)
    await served.abort(["a"])
    done = await job
    assert done.finish is Finish.ABORT and done.compliant is False and 10 <= len(done.tokens) < 60
    gone = asyncio.create_task(served.generate(ids(1), sampling(), request="b"))
    await sampled(served, 30)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    health = await served.health()
    assert (health.constrained, health.compliant, health.running) == (1, 0, 0), "a caller that left counts"
    await served.close()


async def test_logprobs_are_those_after_the_mask_in_a_mixed_batch() -> None:
    served = engine()
    await served.start()
    bound = sampling("[xyz]{30}")
    free = Sampling(max_tokens=30)
    done = await asyncio.gather(
        *(served.generate(ids(i), bound if i % 2 else free, request=str(i)) for i in range(6))
    )
    allowed = [id for id, piece in enumerate(VOCABULARY.pieces) if piece in (b"x", b"y", b"z")]
    for i, each in enumerate(done):
        full = np.concatenate([ids(i), each.tokens])
        for at in (0, 7, 29):
            before = full[: 20 + at]
            logp = [
                float((await served.score(np.append(before, id).astype(np.int32)))[-1])
                for id in (allowed if i % 2 else range(VOCAB))
            ]
            chosen = float((await served.score(full[: 21 + at]))[-1])
            assert abs(chosen - np.logaddexp.reduce(logp) - each.logprobs[at]) < 1e-5
        assert re.fullmatch("[xyz]{30}", text(each)) if i % 2 else each.compliant is None
    await served.close()
