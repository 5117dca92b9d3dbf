"""Shape of the decoder; no torch.

Role: what engine and trainer build the same model from. Neighbours: `decoder`. Invariant: two equal configs
give equal shapes.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rollwright.plugins import PartConfig


class ModelConfig(PartConfig):
    """A Llama-style decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    dim: int = Field(96, ge=1)
    """Width of the residual stream."""
    layers: int = Field(3, ge=1)
    """Number of blocks."""
    heads: int = Field(4, ge=1)
    """Query heads; `dim` must divide by it."""
    kv_heads: int = Field(4, ge=1)
    """Key/value heads; `heads` must divide by it (fewer is grouped-query attention)."""
    ffn: int = Field(256, ge=1)
    """Hidden width of the SwiGLU feed-forward."""
    context: int = Field(512, ge=1)
    """Longest row in tokens."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies (arXiv 2104.09864)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of RMSNorm."""
    tied: bool = True
    """Share the input embedding with the output head."""

    @model_validator(mode="after")
    def _divides(self) -> ModelConfig:
        if self.dim % self.heads or self.heads % self.kv_heads or (self.dim // self.heads) % 2:
            raise ValueError(
                f"dim {self.dim} must divide by heads {self.heads} into an even head size, "
                f"and heads by kv_heads {self.kv_heads}"
            )
        return self
