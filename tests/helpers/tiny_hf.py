"""Tiny Hugging Face decoders with random weights, made on the spot, and what transformers says of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

VOCAB = 97

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama stretched": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 5},
    "mistral, no window": {"sliding_window": None},
    "qwen2": {},
    "qwen2, windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3 tied": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 5, "head_dim": 8, "layer_types": LOCAL_GLOBAL},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": None},
    "gemma2": {
        "head_dim": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 2.0,
        "sliding_window": 5,
    },
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
"""Model type, and after it what is special → what its configuration has beyond `COMMON`."""

LEAN = tuple(name for name in FAMILIES if re.match("(llama|mistral|qwen2|qwen3)([ ,]|$)", name))
"""Those of them that our own decoder takes."""


def tiny(name: str, seed: int = 0, **settings: Any) -> Any:
    """A model of that family whose every weight, biases and norms too, is random; the same for a seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.split(",")[0].split(" ")[0]
    config = AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[name], **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return lm


def rows(lengths: Sequence[int], seed: int = 1) -> list[Tensor]:
    """int64[n] random ids of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


@torch.inference_mode()
def eager(lm: Any, each: Sequence[Tensor]) -> Tensor:
    """float[Σ n, vocab] of transformers' own forward, each row alone."""
    return torch.cat([lm(input_ids=row[None], use_cache=False).logits[0] for row in each])
