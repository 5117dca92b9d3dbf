"""Whatever one request asks for, it ends alone: those beside it and the engine go on."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from rollwright.clock import SystemClock
from rollwright.engine.base import PauseMode
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.embedded.engine import EmbeddedEngine
from rollwright.engine.grammar.base import Bits
from rollwright.errors import ConstraintError, EngineError, WeightMismatch
from rollwright.events import NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.types import Constraint, ConstraintKind, Finish, Ints, PolicyVersion, Probe, Sampling

VOCABULARY = PieceTokenizer([], ["<end>"]).vocabulary()
VERSION = PolicyVersion(run="poison")
PADDED = len(VOCABULARY.pieces) + 100  # as checkpoints have it: more rows than tokens


def engine() -> EmbeddedEngine:
    model = Decoder(ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn=32, context=128), PADDED)
    model.initialise(torch.Generator().manual_seed(0))
    return EmbeddedEngine(model, EmbeddedConfig(), VERSION, SystemClock(), NullSink(), vocabulary=VOCABULARY)


def ids(seed: int) -> Ints:
    return np.random.default_rng(seed).integers(0, 256, 12).astype(np.int32)


def regex(source: str, **more: Any) -> Sampling:
    constraint = Constraint(kind=ConstraintKind.REGEX, source=source)
    return structs.replace(Sampling(max_tokens=30, constraint=constraint), **more)


POISON: dict[str, Sampling] = {
    "only the empty word": regex("a{0}"),
    "no word at all": Sampling(
        max_tokens=9, constraint=Constraint(kind=ConstraintKind.GRAMMAR, source='start: start "a"')
    ),
    "too large an expression": regex("((a{200}){200}){200}b"),
    "a stop id that is none": regex("[xyz]{3}[xyz]*", stop=(-1,)),
    "a stop id beyond the vocabulary": regex("[xyz]{3}[xyz]*", stop=(10**6,)),
    "too hot for float32": regex("[ab]+", temperature=1e39),
    "hot": regex("[ab]+", temperature=1e5),
    "cold": regex("[ab]+", temperature=1e-30),
    "many stop ids": Sampling(stop=tuple(range(1000))),
}


@pytest.mark.needs("grammar")
@pytest.mark.parametrize("name", POISON)
async def test_one_request_never_ends_the_engine(name: str) -> None:
    served = engine()
    await served.start()
    beside = asyncio.create_task(served.generate(ids(0), Sampling(max_tokens=60), request="beside"))
    await asyncio.sleep(0)
    try:
        done = await served.generate(ids(1), POISON[name], request="bad")
    except (ValueError, EngineError) as error:
        assert "stopped in a step" not in str(error)
    else:
        assert done.compliant in (None, True, False)
    assert len((await beside).tokens) == 60
    after = await served.generate(ids(2), regex("[ab]{4}"), request="after")
    assert after.compliant and after.finish is Finish.STOP and len(after.tokens) <= 5
    served.check_integrity()
    await served.close()


class Fails:
    """A matcher whose library gives up."""

    complete = ended = False

    def __init__(self, when: str) -> None:
        self._when = when

    def mask(self, out: Bits) -> None:
        if self._when == "mask":
            raise RuntimeError("too many expressions")
        out[:] = 0 if self._when == "nothing" else ~np.uint32(0)

    def accept(self, token: int) -> None:
        raise RuntimeError("too many expressions")


@pytest.mark.parametrize("when", ["mask", "nothing", "accept"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failing_matcher_fails_its_request_alone(when: str, streamed: bool) -> None:
    served = engine()
    await served.start()
    served._watchers.of = lambda sampling, room: (  # type: ignore[method-assign]
        lambda: (Fails(when) if sampling.constraint else None, None)
    )
    beside = asyncio.create_task(served.generate(ids(0), Sampling(max_tokens=40), request="beside"))
    with pytest.raises(ConstraintError):
        if streamed:
            async for _ in served.stream(ids(1), regex("a"), request="bad"):
                pass
        else:
            await served.generate(ids(1), regex("a"), request="bad")
    assert len((await beside).tokens) == 40
    served.check_integrity()
    health = await served.health()
    assert health.running == 0 and health.ready
    await served.close()


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 2**31])
async def test_a_priority_has_bounds(priority: int) -> None:
    served = engine()
    await served.start()
    with pytest.raises(ValueError, match="32 bits"):
        await served.generate(ids(0), Sampling(), request="x", priority=priority)
    assert len((await served.generate(ids(0), Sampling(max_tokens=3), request="x")).tokens) == 3
    await served.close()


async def test_weights_are_taken_whole_or_not_at_all() -> None:
    served = engine()
    await served.start()
    before = {name: tensor.detach().clone() for name, tensor in served._model.named_parameters()}
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    state["norm.weight"] = torch.empty(16, device="meta")
    with pytest.raises(WeightMismatch):
        await served.update(state, VERSION.next())
    for name, tensor in served._model.named_parameters():
        assert torch.equal(tensor, before[name]), f"{name} was changed"
    with pytest.raises(WeightMismatch, match="cannot score"):
        await served.score(ids(0))
    await served.update(before, VERSION.next())
    probe = Probe(tokens=ids(0), logprobs=await served.score(ids(0)))
    assert await served.update(before, VERSION.next().next(), probe) == 0
    await served.close()


async def test_a_pause_that_somebody_ends_does_not_say_that_it_is_one() -> None:
    served = engine()
    await served.start()
    long = asyncio.create_task(served.generate(ids(0), Sampling(max_tokens=50), request="x"))
    await asyncio.sleep(0)
    pausing = asyncio.create_task(served.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await served.resume()
    with pytest.raises(EngineError, match="resumed"):
        await pausing
    assert len((await long).tokens) == 50
    await served.close()
