"""The decoder that engine and trainer share, so that both compute the same numbers.

Role: Llama-style transformer over a flat list of N tokens (rows back to back, no padding); how tokens see
each other is handed in as `Attend`. Neighbours: `attention.causal` for whole rows (trainer, scoring); the
embedded engine brings its own over cached KV. Invariant: token i's output depends only on tokens that
`attend` lets it see. Formulas: RMSNorm arXiv 1910.07467, RoPE 2104.09864, SwiGLU 2002.05202, grouped-query
attention 2305.13245, norms of queries and keys 2302.05442.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollwright.model.base import Shape
from rollwright.model.config import ModelConfig
from rollwright.model.rotary import Stretch, table

if TYPE_CHECKING:
    from rollwright.model.base import Attend


@dataclass(frozen=True)
class Variant:
    """What checkpoints of a family have beyond `ModelConfig`; the default adds nothing."""

    head_dim: int | None = None
    """Size of a head where it is not `dim` / `heads`."""
    qkv_bias: bool = False
    """A bias on queries, keys and values (Qwen 2)."""
    head_norm: bool = False
    """A norm of each query and key head before the rotation (Qwen 3)."""
    windows: tuple[int | None, ...] | None = None
    """See `Shape.windows`; None is no window in any layer (Mistral has one)."""
    stretch: Stretch | None = None
    """How rotary frequencies are stretched (Llama 3)."""
    single: bool = False
    """Rotary angles in float32, as the checkpoint's other engines compute them."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight. The mean of squares is a matrix product: fewer and faster passes than
    `F.rms_norm` on a CPU, forward and backward."""

    mean: Tensor
    eps: Tensor

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("mean", torch.full((dim, 1), 1 / dim), persistent=False)
        self.register_buffer("eps", torch.tensor([eps]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.addmm(self.eps, x * x, self.mean).rsqrt() * self.weight


class HeadNorm(nn.Module):
    """RMSNorm of each head of x[N, heads + kv_heads, D], with one weight for queries and one for keys."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.eps = heads, kv_heads, eps
        self.query = nn.Parameter(torch.ones(head_dim))
        self.key = nn.Parameter(torch.ones(head_dim))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat((self.query.expand(self.heads, -1), self.key.expand(self.kv_heads, -1)))
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, variant: Variant) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.head_dim = variant.head_dim or config.dim // config.heads
        width = (config.heads + 2 * config.kv_heads) * self.head_dim
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.qkv = nn.Linear(config.dim, width, bias=variant.qkv_bias)
        self.head_norm = (
            HeadNorm(config.heads, config.kv_heads, self.head_dim, config.norm_eps)
            if variant.head_norm
            else None
        )
        self.out = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, keep: Tensor | None = None
    ) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).view(x.shape[0], -1, self.head_dim)
        turned = qkv[:, : self.heads + self.kv_heads]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        rotated = rotate(turned, cos, sin)
        gathered = attend(
            self.layer,
            rotated[:, : self.heads],
            rotated[:, self.heads :],
            qkv[:, self.heads + self.kv_heads :],
        )
        gathered = gathered.reshape(x.shape[0], -1)
        if keep is not None:
            x, gathered = x.index_select(0, keep), gathered.index_select(0, keep)
        x = x + self.out(gathered)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return x + down


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x[N, heads, D] with cos, sin [N, 1, D], the first half of `sin` negated; the two halves of a
    head are the pair (Hugging Face order)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Decoder(nn.Module):
    """Token ids and positions in, final hidden states out; `logits` turns those into scores over the
    vocabulary."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, vocab: int, variant: Variant | None = None) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        variant = variant or Variant()
        head_dim = variant.head_dim or config.dim // config.heads
        self.shape = Shape(
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=head_dim,
            context=config.context,
            scale=head_dim**-0.5,
            windows=variant.windows or (None,) * config.layers,
        )
        self.embed = nn.Embedding(vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, i, variant) for i in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.dim, vocab, bias=False)
        cos, sin = table(head_dim, config.context, config.rope_theta, variant.stretch, single=variant.single)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights from `generator`: normal(1/√dim), output projections scaled by 1/√(2·layers)
        (GPT-2). A smaller deviation, as large models have it, makes a model this small learn several times
        slower.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            std = self.config.dim**-0.5
            if name.endswith(("out.weight", "down.weight")):
                std *= (2 * self.config.layers) ** -0.5
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """int64[N] ids at int64[N] positions → float32[N, dim]; with `keep` int64[K] only those K rows of
        it.

        Behind the last attention a token needs no other, so the rest of the last block runs on K tokens
        only.
        """
        x: Tensor = self.embed(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, attend, keep if layer == last else None)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[N, dim] → float32[N, vocab]."""
        return F.linear(hidden, self.embed.weight if self.head is None else self.head.weight)
