"""The keys of a Hugging Face config.json that decide about memory, typed.

Role: the boundary where a foreign file becomes fields. Neighbours: `read` makes a `Card` of it. Invariant: a
key that is not listed has no effect on the figures; a listed key of another type is refused.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Raw(Struct, frozen=True, kw_only=True):
    """A config.json; None is "not said"."""

    model_type: str = ""
    text_config: Raw | None = None
    is_encoder_decoder: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    vocab_size: int | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: int | None = None
    n_positions: int | None = None

    hidden_size: int | None = None
    n_embd: int | None = None
    num_hidden_layers: int | None = None
    n_layer: int | None = None
    num_attention_heads: int | None = None
    n_head: int | None = None
    num_key_value_heads: int | None = None
    num_kv_heads: int | None = None
    n_head_kv: int | None = None
    multi_query: bool | None = None
    new_decoder_architecture: bool | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None

    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    sliding_window_pattern: int | str | None = None
    attention_chunk_size: int | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int | None = None
    full_attention_interval: int | None = None
    attn_layer_period: int | None = None
    attn_layer_offset: int | None = None
    num_kv_shared_layers: int | None = None
    vocab_size_per_layer_input: int | None = None
    hidden_size_per_layer_input: int | None = None

    linear_num_value_heads: int | None = None
    linear_num_key_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    mamba_d_state: int | None = None
    mamba_d_conv: int | None = None
    mamba_expand: int | None = None
    mamba_dt_rank: int | str | None = None
    mamba_n_heads: int | None = None
    mamba_num_heads: int | None = None
    mamba_d_head: int | str | None = None
    mamba_head_dim: int | None = None
    mamba_n_groups: int | None = None
    n_groups: int | None = None
    ssm_state_size: int | None = None
    conv_kernel: int | None = None

    intermediate_size: int | list[int] | None = None
    intermediate_size_mlp: int | None = None
    moe_intermediate_size: int | None = None
    n_inner: int | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None
    interleave_moe_layer_step: int | None = None
    expert_layer_period: int | None = None
    expert_layer_offset: int | None = None
