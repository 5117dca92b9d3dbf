"""Causal attention of rows laid back to back, windows and scale included, against the plain formula."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollwright.model import attention
from rollwright.model.attention import causal, positions
from rollwright.model.base import Shape

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, context=64, scale=0.2, windows=(None, 3))


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, scale: float) -> Tensor:
    """Softmax over what a token may see, token by token."""
    found, start = [], 0
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    for length in lengths:
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            weight = torch.einsum("hd,thd->ht", q[i], k[first : i + 1]).mul(scale).softmax(-1)
            found.append(torch.einsum("ht,thd->hd", weight, v[first : i + 1]))
        start += length
    return torch.stack(found)


def made(total: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(total)
    q = torch.randn(total, 4, 8, generator=generator)
    return q, *torch.randn(2, total, 2, 8, generator=generator)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 24),
    block=st.integers(1, 24),
)
def test_a_token_sees_its_window_of_its_own_row(lengths: list[int], window: int | None, block: int) -> None:
    q, k, v = made(sum(lengths))
    shape = dataclasses.replace(SHAPE, windows=(None, window))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_BLOCK", block)
        attend = causal(lengths, shape)
        for layer, each in enumerate(shape.windows):
            found = attend(layer, q, k, v)
            assert torch.allclose(found, plain(q, k, v, lengths, each, 0.2), atol=1e-5)


def test_without_a_shape_every_layer_sees_all_at_the_usual_scale() -> None:
    q, k, v = made(12)
    found = causal([5, 7])(1, q, k, v)
    assert torch.allclose(found, plain(q, k, v, [5, 7], None, 8**-0.5), atol=1e-5)


def test_positions_count_within_each_row() -> None:
    assert positions([2, 3]).tolist() == [0, 1, 0, 1, 2]


def test_it_runs_where_the_tokens_are() -> None:
    """The meta device refuses tensors of another device as an accelerator does."""
    q, k, v = (x.to("meta") for x in made(12))
    found = causal([5, 7], SHAPE)(1, q, k, v)
    assert (found.device.type, found.shape) == ("meta", q.shape)
    assert positions([2, 3], "meta").device.type == "meta"
