"""Layers with a state of constant size: linear attention and Mamba.

Role: how many numbers a sequence keeps there. Neighbours: `read` asks. Invariant: the recurrent state is
float32, the convolution keeps its last kernel − 1 inputs. Sources: Gated DeltaNet (arXiv 2412.06464) as in
Qwen3-Next, Mamba (arXiv 2312.00752) as in Jamba, Mamba-2 (arXiv 2405.21060) as in Nemotron-H.
"""

from __future__ import annotations

from rollwright.engine.kv.card import Kind, Layer
from rollwright.engine.kv.raw import Raw
from rollwright.errors import ConfigError


def linear(raw: Raw, where: str) -> Layer:
    """A gated delta rule: one key × value matrix a value head; queries, keys and values are convolved.

    Raises:
        ConfigError: a size is missing.
    """
    keys, values = raw.linear_num_key_heads, raw.linear_num_value_heads
    key, value = raw.linear_key_head_dim, raw.linear_value_head_dim
    if not (keys and values and key and value):
        raise ConfigError(
            f"{where}: linear attention without linear_num_key_heads, linear_num_value_heads, "
            "linear_key_head_dim and linear_value_head_dim: its state is unknown"
        )
    kernel = raw.linear_conv_kernel_dim or 4
    return Layer(
        Kind.STATE, state=values * key * value, convolution=(2 * keys * key + values * value) * (kernel - 1)
    )


def mamba(raw: Raw, width: int, where: str) -> Layer:
    """Mamba, or Mamba-2 where the file names its heads; `width` of the residual stream.

    Raises:
        ConfigError: the size of the state is missing.
    """
    state, kernel = raw.mamba_d_state or raw.ssm_state_size, raw.mamba_d_conv or raw.conv_kernel or 4
    if not state:
        raise ConfigError(f"{where}: Mamba without mamba_d_state or ssm_state_size: its state is unknown")
    inner = (raw.mamba_expand or 2) * width
    heads = raw.mamba_n_heads or raw.mamba_num_heads
    if heads is None:
        return Layer(Kind.STATE, state=inner * state, convolution=inner * (kernel - 1))
    size = raw.mamba_head_dim or (raw.mamba_d_head if isinstance(raw.mamba_d_head, int) else inner // heads)
    groups = raw.mamba_n_groups or raw.n_groups or 1
    convolved = heads * size + 2 * groups * state
    return Layer(Kind.STATE, state=heads * size * state, convolution=convolved * (kernel - 1))
