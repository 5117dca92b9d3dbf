"""The small models that the engine benchmarks run: one set of random weights, once as our decoder, once as
transformers' Llama, so that the rival computes the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder, Variant

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB = {"0.9M": 1536, "5M": 2048}

CONFIGS = {
    "0.9M": ModelConfig(dim=128, layers=4, heads=4, kv_heads=2, ffn=344, context=4096),
    "5M": ModelConfig(dim=256, layers=6, heads=8, kv_heads=4, ffn=688, context=4096),
}

Size = Literal["0.9M", "5M"]


def decoder(size: Size, seed: int = 0, context: int | None = None) -> Decoder:
    """Our decoder of that size with random weights, in evaluation mode without gradients."""
    config = CONFIGS[size]
    if context is not None:
        config = config.model_copy(update={"context": context})
    made = Decoder(config, VOCAB[size], Variant(single=True))
    made.initialise(torch.Generator().manual_seed(seed))
    return made.eval().requires_grad_(False)


def pair(size: Size, seed: int = 0, context: int | None = None) -> tuple[Decoder, LlamaForCausalLM]:
    """The same random weights as our decoder and as transformers' Llama; logits agree to 1e-5
    over some thousand tokens.

    Needs the extra `hf`. `context` is the longest row in tokens, 4,096 unless told.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = decoder(size, seed, context)
    c = ours.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ours.vocab,
            hidden_size=c.dim,
            intermediate_size=c.ffn,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            max_position_embeddings=c.context,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=c.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    theirs.load_state_dict(split(ours), strict=False)
    theirs.tie_weights()
    return ours, theirs.eval().requires_grad_(False)


def split(ours: Decoder) -> dict[str, torch.Tensor]:
    """Our decoder's weights under the names of transformers' Llama."""
    c, state = ours.config, ours.state_dict()
    head = c.dim // c.heads
    widths = (c.heads * head, c.kv_heads * head, c.kv_heads * head)
    found = {"model.embed_tokens.weight": state["embed.weight"], "model.norm.weight": state["norm.weight"]}
    if not c.tied:
        found["lm_head.weight"] = state["head.weight"]
    for i in range(c.layers):
        here, there = f"blocks.{i}.", f"model.layers.{i}."
        q, k, v = state[here + "qkv.weight"].split(widths)
        gate, up = state[here + "gate_up.weight"].chunk(2)
        found |= {
            there + "input_layernorm.weight": state[here + "attention_norm.weight"],
            there + "self_attn.q_proj.weight": q,
            there + "self_attn.k_proj.weight": k,
            there + "self_attn.v_proj.weight": v,
            there + "self_attn.o_proj.weight": state[here + "out.weight"],
            there + "post_attention_layernorm.weight": state[here + "ffn_norm.weight"],
            there + "mlp.gate_proj.weight": gate,
            there + "mlp.up_proj.weight": up,
            there + "mlp.down_proj.weight": state[here + "down.weight"],
        }
    return found
