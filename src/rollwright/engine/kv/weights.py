"""How many weights a model has, counted from its shape.

Role: `Parameters` for weights' bytes and the cost of a step. Neighbours: `read`. Invariant: exact for dense
Llama-style models; an estimate elsewhere (biases, small norms and routers' extras are left out), within a few
per cent of what the models' cards say. `--weights` overrides it.
"""

from __future__ import annotations

from rollwright.engine.kv.card import Kind, Layer, Parameters
from rollwright.engine.kv.raw import Raw

UNGATED = ("falcon", "gpt2", "gpt_neox", "gpt_bigcode", "phi", "bloom", "starcoder2", "nemotron_h")
"""Model types whose MLP has two matrices, not three."""


def count(raw: Raw, layers: tuple[Layer, ...], tied: bool) -> Parameters:
    """Weights of the decoder that `raw` describes and `layers` make up."""
    width = raw.hidden_size or raw.n_embd or 0
    dense = (raw.vocab_size or 0) * width * (1 if tied else 2) + width
    dense += len(layers) * (raw.vocab_size_per_layer_input or 0) * (raw.hidden_size_per_layer_input or 0)
    experts = 0
    for index, layer in enumerate(layers):
        dense += 2 * width + _mixing(raw, layer, width)
        if _is_mlp(raw, index, layer):
            ours, theirs = _mlp(raw, index, width)
            dense, experts = dense + ours, experts + theirs
    among = _experts(raw)
    share = (raw.num_experts_per_tok or 1) / among if experts else 1.0
    return Parameters(dense, experts, share)


def _mixing(raw: Raw, layer: Layer, width: int) -> int:
    """What mixes tokens."""
    heads = raw.num_attention_heads or raw.n_head or 8
    if layer.kind is Kind.NONE:
        return 0
    if layer.kind is Kind.STATE:
        return _recurrent(raw, width)
    if raw.kv_lora_rank:
        nope, rope, value = raw.qk_nope_head_dim or 0, raw.qk_rope_head_dim or 0, raw.v_head_dim or 0
        query = heads * (nope + rope)
        asked = raw.q_lora_rank * (width + query) if raw.q_lora_rank else width * query
        latent = width * (raw.kv_lora_rank + rope) + raw.kv_lora_rank * heads * (nope + value)
        return asked + latent + heads * value * width
    size = layer.key or raw.head_dim or width // heads
    return width * (2 * heads * size + layer.heads * (layer.key + layer.value))


def _recurrent(raw: Raw, width: int) -> int:
    if raw.linear_num_value_heads:
        keys = (raw.linear_num_key_heads or 0) * (raw.linear_key_head_dim or 0)
        values = raw.linear_num_value_heads * (raw.linear_value_head_dim or 0)
        return width * (2 * keys + 3 * values)
    heads = raw.mamba_n_heads or raw.mamba_num_heads
    state = raw.mamba_d_state or raw.ssm_state_size or 16
    inner = (raw.mamba_expand or 2) * width
    if heads is not None:
        size = raw.mamba_head_dim or (
            raw.mamba_d_head if isinstance(raw.mamba_d_head, int) else inner // heads
        )
        inner, groups = heads * size, raw.mamba_n_groups or raw.n_groups or 1
        return width * (2 * inner + 2 * groups * state + heads) + inner * width
    rank = raw.mamba_dt_rank if isinstance(raw.mamba_dt_rank, int) else -(-width // 16)
    return 3 * width * inner + inner * (2 * rank + 3 * state)


def _is_mlp(raw: Raw, index: int, layer: Layer) -> bool:
    """Whether a layer has an MLP: in `hybrid_override_pattern` that is a layer of its own."""
    return layer.kind is Kind.NONE if raw.hybrid_override_pattern else True


def _mlp(raw: Raw, index: int, width: int) -> tuple[int, int]:
    """Weights of a layer's MLP: those of every token, those of all experts."""
    matrices = 2 if raw.model_type in UNGATED else 3
    given = raw.intermediate_size
    inner = given[index] if isinstance(given, list) else given or raw.n_inner or 4 * width
    among = _experts(raw)
    if not _routed(raw, index, among):
        return matrices * width * (raw.intermediate_size_mlp or inner), 0
    expert = raw.moe_intermediate_size or inner
    shared = (raw.n_shared_experts or 0) * expert + (raw.shared_expert_intermediate_size or 0)
    if raw.model_type == "llama4_text":
        shared = inner
    return matrices * width * shared + width * among, matrices * width * expert * among


def _experts(raw: Raw) -> int:
    return raw.n_routed_experts or raw.num_local_experts or raw.num_experts or 0


def _routed(raw: Raw, index: int, among: int) -> bool:
    """Whether the MLP of layer `index` is a mixture of `among` experts."""
    if among < 2 or index < (raw.first_k_dense_replace or 0) or index in (raw.mlp_only_layers or ()):
        return False
    if raw.hybrid_override_pattern:
        return raw.hybrid_override_pattern[index] == "E"
    if raw.expert_layer_period:
        return index % raw.expert_layer_period == (raw.expert_layer_offset or 0)
    return (index + 1) % (raw.interleave_moe_layer_step or raw.decoder_sparse_step or 1) == 0
