"""The served form of a decoder is the decoder: its logits, under all weights, and in replay too."""

import numpy as np
import pytest
import torch
from cold import CONTEXT, VOCAB, Kind, copied, decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.engine.embedded.attend import StepAttend
from rollwright.engine.embedded.kv import KV
from rollwright.engine.embedded.plan import Plan
from rollwright.engine.embedded.replay import Replay
from rollwright.model.attention import causal, positions
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.model.folded import Folded, served

TOLERANCE = 1e-5
KINDS = [Kind(), Kind(kv_heads=1), Kind(kv_heads=4, bias=True), Kind(windows=(None, 6))]


def logp(model: Decoder | Folded, lengths: list[int], seed: int = 0) -> torch.Tensor:
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, sum(lengths)))
    with torch.inference_mode():
        hidden = model.forward(ids, positions(lengths), causal(lengths, model.shape))
        return model.logits(hidden).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_decoders(kind: Kind) -> None:
    model = copied(kind, 0)
    folded = served(model)
    assert isinstance(folded, Folded)
    for lengths in ([1], [CONTEXT], [3, 50, 7]):
        assert (logp(model, lengths) - logp(folded, lengths)).abs().max() < TOLERANCE
    ids = torch.arange(9)
    keep = torch.tensor([8, 3])
    with torch.inference_mode():
        rows = [m.forward(ids, ids, causal([9], m.shape), keep) for m in (model, folded)]
        a, b = model.logits(rows[0]), folded.logits(rows[1])
    assert a.shape == b.shape == (2, VOCAB) and (a - b).abs().max() < TOLERANCE * a.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_count_from_refresh_on(kind: Kind) -> None:
    model = copied(kind, 0)
    folded = Folded(model)
    before = logp(folded, [20])
    model.load_state_dict(decoder(kind, 1).state_dict())
    assert torch.equal(logp(folded, [20]), before), "half of the new weights are in use"
    folded.refresh()
    after = logp(folded, [20])
    assert (after - logp(model, [20])).abs().max() < TOLERANCE and (after - before).abs().max() > 0.1


def test_a_tied_head_follows_the_embedding() -> None:
    model = Decoder(ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn=16, tied=True), VOCAB)
    model.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.norm.weight.mul_(torch.linspace(0.5, 2, 16))
    assert (logp(model, [30]) - logp(Folded(model), [30])).abs().max() < TOLERANCE


class Other(Decoder):
    """A decoder of somebody's own, which may compute something else."""


def test_what_cannot_be_folded_is_served_as_it_is() -> None:
    other = Other(decoder(Kind(), 0).config, VOCAB)
    for model in (copied(Kind(head_norm=True), 0), copied(Kind(), 0).double(), other):
        assert served(model) is model


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """(a model's kind, then for each step: how far each row is, as jumps)."""
    rows = draw(st.integers(1, 4))
    start = [draw(st.integers(0, 40)) for _ in range(rows)]
    steps = draw(st.lists(st.sampled_from(["next", "next", "next", "jump", "grow", "weights"]), max_size=25))
    found, places = [], start
    for step in steps:
        places = [p + 1 for p in places] if step != "jump" else [draw(st.integers(0, 90)) for _ in places]
        found.append((["next", "jump", "grow", "weights"].index(step), places))
    return found


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS[:3]), lives())
def test_replay_is_the_forward_whatever_happened_between(
    kind: Kind, life: list[tuple[int, list[int]]]
) -> None:
    if not life:
        return
    model, rng = copied(kind, 0), np.random.default_rng(0)
    folded, rows = Folded(model), len(life[0][1])
    kv = KV(folded.shape, torch.device("cpu"), torch.float32)
    kv.reserve(rows, 64, 0)
    kv.table.normal_(generator=torch.Generator().manual_seed(1))
    replay, before_that = Replay(folded, kv, rows), np.full(rows, -2)
    with torch.inference_mode():
        for what, at in life:
            places = np.array(at, np.int64)
            if what == 3:
                model.load_state_dict(decoder(kind, int(rng.integers(3))).state_dict())
                folded.refresh()
            if what == 2 or places.max() >= kv.places:
                kv.reserve(rows + 8 * (what == 2), int(places.max()) + 1, rows)
            ids, offset = rng.integers(0, VOCAB, rows), rng.integers(0, CONTEXT - 130, rows)
            plan = Plan(np.arange(rows), places + offset, places, rows, (), ())
            before = kv.table.clone()
            attend = StepAttend(kv, plan, torch.from_numpy)
            hidden = folded.forward(torch.from_numpy(ids), torch.from_numpy(plan.positions), attend)
            expected, written = folded.logits(hidden).log_softmax(-1), kv.table.clone()
            kv.table.copy_(before)
            again, before_that = bool((places == before_that + 1).all()), places
            found = replay.logits(ids, plan.positions, places, again).log_softmax(-1)
            assert (found - expected).abs().max() < TOLERANCE
            assert (kv.table - written).abs().max() < TOLERANCE
