"""The decoder as it is served: the same function with fewer and larger operations.

Role: what the embedded engine runs instead of a `Decoder`'s own forward. Neighbours: made from a decoder,
refreshed whenever its weights change. Invariant: hidden states, keys and values are its own, logits equal the
decoder's up to rounding.

The norms' weights and the attention's scale are folded into the matrices behind them, which are kept as they
are multiplied with. The two halves of a head become neighbours, in queries and keys alike, which leaves their
products as they are: RoPE is one complex multiplication then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from rollwright.model.decoder import Block, Decoder

if TYPE_CHECKING:
    from rollwright.model.base import Attend, Model


@dataclass(frozen=True)
class Layer:
    """One block's matrices, [in, out]."""

    qkv: Tensor
    bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Folded:
    """Serves `decoder`, whose weights it copies."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.vocab = decoder, decoder.vocab
        self.shape = replace(decoder.shape, scale=1.0)
        self._turned = self.shape.heads + self.shape.kv_heads
        half = self.shape.head_dim // 2
        self.turn = torch.complex(decoder.cos[..., :half], decoder.sin[..., half:])
        self.mean, self.eps = decoder.norm.mean, decoder.norm.eps
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Take the decoder's weights as they are now."""
        decoder = self._decoder
        self.layers = [self._folded(cast(Block, block)) for block in decoder.blocks]
        head = decoder.embed.weight if decoder.head is None else decoder.head.weight
        self.embed = decoder.embed.weight.detach().clone()
        self.head = (head * decoder.norm.weight).t().contiguous()

    def _folded(self, block: Block) -> Layer:
        shape, size = self._decoder.shape, self._decoder.shape.head_dim
        parts = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]

        def rows(weight: Tensor) -> Tensor:
            q, k, v = torch.split(weight, parts)
            return torch.cat((_paired(q, size) * shape.scale, _paired(k, size), v))

        bias = block.qkv.bias
        return Layer(
            qkv=rows(block.qkv.weight * block.attention_norm.weight).t().contiguous(),
            bias=None if bias is None else rows(bias.unsqueeze(1)).squeeze(1),
            out=block.out.weight.t().contiguous(),
            gate_up=(block.gate_up.weight * block.ffn_norm.weight).t().contiguous(),
            down=block.down.weight.t().contiguous(),
        )

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """See `model.base.Model`."""
        shape, count = self.shape, len(ids)
        pairs, last = (count, -1, shape.head_dim // 2, 2), shape.layers - 1
        parts = [shape.heads, shape.kv_heads, shape.kv_heads]
        x = self.embed.index_select(0, ids)
        turn = self.turn.index_select(0, positions)
        for number, layer in enumerate(self.layers):
            normed = self._normed(x)
            if layer.bias is None:
                qkv = torch.mm(normed, layer.qkv)
            else:
                qkv = torch.addmm(layer.bias, normed, layer.qkv)
            torch.view_as_complex(qkv.view(pairs)).narrow(1, 0, self._turned).mul_(turn)
            q, k, v = torch.split(qkv.view(count, -1, shape.head_dim), parts, 1)
            gathered = attend(number, q, k, v).reshape(count, -1)
            if keep is not None and number == last:
                x, gathered = x.index_select(0, keep), gathered.index_select(0, keep)
            x.addmm_(gathered, layer.out)
            gate, up = torch.mm(self._normed(x), layer.gate_up).chunk(2, 1)
            x.addmm_(F.silu(gate).mul_(up), layer.down)
        return self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.addmm(self.eps, x * x, self.mean).rsqrt_()

    def logits(self, hidden: Tensor) -> Tensor:
        """See `model.base.Model`."""
        return torch.mm(hidden, self.head)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The decoder's."""
        return self._decoder.named_parameters()


def served(model: Model) -> Model:
    """`model`, or the faster form of it where there is one: for float32 on a CPU, where a step is mostly the
    number of its operations."""
    if type(model) is not Decoder:  # what is derived from it may compute something else
        return model
    weights, blocks = model.embed.weight, [cast(Block, block) for block in model.blocks]
    plain = all(block.head_norm is None for block in blocks)
    fits = weights.device.type == "cpu" and weights.dtype is torch.float32
    return Folded(model) if plain and fits else model


def _paired(weight: Tensor, size: int) -> Tensor:
    """Rows of [heads · size, …] such that the pair (i, i + size/2) of a head becomes (2i, 2i + 1)."""
    return weight.view(-1, 2, size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
