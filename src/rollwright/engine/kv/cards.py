"""Models by name: what their public config.json says, as far as it decides about memory.

Role: the built-in cards of `rollwright plan kv NAME`. Neighbours: `read` reads them like any file. Invariant:
values are those of the published files; `article` is the textbook case (32 layers, hidden size 4096,
multi-head attention, 32k tokens), which is no published model.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from rollwright.engine.kv.card import Card
from rollwright.engine.kv.raw import Raw
from rollwright.engine.kv.read import card, read
from rollwright.errors import ConfigError

LOCAL5 = ["sliding_attention"] * 4 + ["full_attention"]

CARDS = {
    "article": Raw(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=32768,
        torch_dtype="float16",
    ),
    "llama-2-7b": Raw(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
        torch_dtype="float16",
    ),
    "llama-3.1-8b": Raw(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "llama-3.1-70b": Raw(
        model_type="llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "llama-4-scout": Raw(
        model_type="llama4_text",
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        attention_chunk_size=8192,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        vocab_size=202048,
        max_position_embeddings=10485760,
    ),
    "smollm2-135m": Raw(
        model_type="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "falcon-7b": Raw(
        model_type="falcon",
        hidden_size=4544,
        num_hidden_layers=32,
        num_attention_heads=71,
        multi_query=True,
        new_decoder_architecture=False,
        vocab_size=65024,
        max_position_embeddings=2048,
    ),
    "mistral-7b": Raw(
        model_type="mistral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        sliding_window=4096,
        vocab_size=32000,
        max_position_embeddings=32768,
    ),
    "qwen2.5-7b": Raw(
        model_type="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        sliding_window=131072,
        use_sliding_window=False,
        max_window_layers=28,
        vocab_size=152064,
        max_position_embeddings=32768,
    ),
    "qwen3-30b-a3b": Raw(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "qwen3-next-80b-a3b": Raw(
        model_type="qwen3_next",
        hidden_size=2048,
        intermediate_size=5120,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        vocab_size=151936,
        max_position_embeddings=262144,
    ),
    "gemma-2-9b": Raw(
        model_type="gemma2",
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=4096,
        vocab_size=256000,
        max_position_embeddings=8192,
    ),
    "gemma-3-27b": Raw(
        model_type="gemma3_text",
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
        vocab_size=262208,
        max_position_embeddings=131072,
    ),
    "gemma-3n-e4b": Raw(
        model_type="gemma3n_text",
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=512,
        layer_types=LOCAL5 * 7,
        num_kv_shared_layers=15,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        vocab_size=262400,
        max_position_embeddings=32768,
    ),
    "gpt-oss-20b": Raw(
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
        num_local_experts=32,
        num_experts_per_tok=4,
        vocab_size=201088,
        max_position_embeddings=131072,
    ),
    "deepseek-v3": Raw(
        model_type="deepseek_v3",
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        vocab_size=129280,
        max_position_embeddings=163840,
    ),
    "deepseek-v2-lite": Raw(
        model_type="deepseek_v2",
        hidden_size=2048,
        intermediate_size=10944,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        vocab_size=102400,
        max_position_embeddings=163840,
    ),
    "jamba-v0.1": Raw(
        model_type="jamba",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=256,
        num_experts=16,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        vocab_size=65536,
        max_position_embeddings=262144,
    ),
}
"""By name."""


def named(model: str) -> Card:
    """A built-in card by name, or the config.json that `model` is the path of.

    Raises:
        ConfigError: neither a card nor a file; or as `read`.
    """
    raw = CARDS.get(model.lower())
    if raw is not None:
        return card(raw, model.lower(), model)
    path = Path(model)
    if "\0" not in model and path.exists():
        return read(path)
    near = difflib.get_close_matches(model.lower(), CARDS, n=1)
    mean = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(
        f"{model}: no model of that name and no file; {mean}give a config.json, its folder, or one of "
        f"{', '.join(CARDS)}"
    )
