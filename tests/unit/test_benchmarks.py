"""The pure parts of the engine benchmarks: the rival computes our model, the ideal is what a trie finds."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.model.attention import causal, positions
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from floor import FORMS, Loop
from workload import Asked, ideal, load, plays


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_the_bare_loop_computes_the_decoder(form: str) -> None:
    config = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, context=32)
    decoder = Decoder(config, 50)
    decoder.initialise(torch.Generator().manual_seed(0))
    for name, weight in decoder.named_parameters():
        if "norm" in name:  # norms of ones would hide that they are folded
            weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    rows, steps = 3, 6
    prompts = torch.randint(50, (rows, 9), generator=torch.Generator().manual_seed(2))
    loop = Loop(decoder, rows, 16, form)
    loop.prefill(prompts)
    loop.ready(8, steps)
    uniforms = torch.rand((steps, rows, 1), generator=torch.Generator().manual_seed(3))
    ids, logprobs = loop.decode(8, steps, uniforms)
    whole = torch.cat((prompts, ids.squeeze(-1).t()), 1)
    lengths = [whole.shape[1]] * rows
    hidden = decoder.forward(whole.reshape(-1), positions(lengths), causal(lengths))
    expected = decoder.logits(hidden).view(rows, -1, 50).log_softmax(-1)[:, 8:-1]
    chosen = expected.gather(2, ids.permute(1, 0, 2))
    torch.testing.assert_close(logprobs.permute(1, 0, 2), chosen, atol=1e-4, rtol=0)
    below = (expected.exp().cumsum(-1) <= uniforms.permute(1, 0, 2)).sum(-1)
    assert torch.equal(below, ids.squeeze(-1).t())


asked = st.builds(
    lambda tokens, whole: Asked(np.array(tokens, np.int32), whole),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.booleans(),
)


@given(st.lists(asked, max_size=8))
def test_the_ideal_is_the_longest_common_beginning_with_anything_before(log: list[Asked]) -> None:
    found = 0
    for i, entry in enumerate(log):
        if entry.whole:
            continue
        common = [0]
        for before in log[:i]:
            same = [a == b for a, b in zip(before.tokens, entry.tokens, strict=False)]
            common.append(same.index(False) if False in same else len(same))
        found += min(max(common), len(entry.tokens) - 1)
    assert ideal(log) == found


def test_the_workload_is_what_the_bar_says_and_repeats() -> None:
    workload = load(200)
    assert (workload.sampled, workload.observed, workload.rollouts) == (16, 24, 64)
    assert workload.generated == 64 * 4 * 16
    one, other = plays(workload, 100), plays(workload, 100)
    assert all(np.array_equal(a.history, b.history) for a, b in zip(one, other, strict=True))
    assert one[0].heard(np.arange(16, dtype=np.int32), 5, 24, 100)
    assert len(one[0].history) == 240 and one[0].due > 5
