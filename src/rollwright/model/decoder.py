"""The decoder that engine and trainer share, so that both compute the same numbers.

Role: Llama-style transformer over a flat list of N tokens (rows back to back, no padding); how tokens see each other is handed in
as `Attend`. Neighbours: `attention.causal` for whole rows (trainer, scoring); the embedded engine brings its own over cached KV.
Invariant: token i's output depends only on tokens that `attend` lets it see. Formulas: RMSNorm arXiv 1910.07467, RoPE 2104.09864,
SwiGLU 2002.05202, grouped-query attention 2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollwright.model.config import ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q[N, H, D], k[N, Hkv, D], v[N, Hkv, D]), rotated already → what each token gathers, [N, H, D]."""


class RMSNorm(nn.Module):
    """x / rms(x) · weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        width = (config.heads + 2 * config.kv_heads) * self.head_dim
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.qkv = nn.Linear(config.dim, width, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).view(x.shape[0], -1, self.head_dim)
        rotated = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin)
        gathered = attend(
            self.layer,
            rotated[:, : self.heads],
            rotated[:, self.heads :],
            qkv[:, self.heads + self.kv_heads :],
        )
        x = x + self.out(gathered.reshape(x.shape[0], -1))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return x + down


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x[N, heads, D] with cos, sin [N, 1, D/2]; the two halves of a head are the pair (Hugging Face order)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Decoder(nn.Module):
    """Token ids and positions in, final hidden states out; `logits` turns those into scores over the vocabulary."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.embed = nn.Embedding(vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.dim, vocab, bias=False)
        half = config.dim // config.heads // 2
        frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.context, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float().unsqueeze(1), persistent=False)
        self.register_buffer("sin", angle.sin().float().unsqueeze(1), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Fresh weights from `generator`: normal(0.02·…), output projections scaled by 1/√(2·layers) (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
                continue
            std = 0.02 if name.startswith("embed") else parameter.shape[1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                std *= (2 * self.config.layers) ** -0.5
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """int64[N] ids at int64[N] positions → float32[N, dim]."""
        x: Tensor = self.embed(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[N, dim] → float32[N, vocab]."""
        return F.linear(hidden, self.embed.weight if self.head is None else self.head.weight)
