"""What keys and values of known models take, worked by hand: every figure below was multiplied out on paper.

The configurations are what the models' public config.json says, cut to the keys that decide about memory. The
built-in cards must say the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollwright.engine.kv.card import Kind
from rollwright.engine.kv.cards import CARDS, named
from rollwright.engine.kv.cost import Cost, Format
from rollwright.engine.kv.read import decoded, read
from rollwright.errors import ConfigError

LLAMA_LIKE = '{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}'
FULL, SLIDING = "full_attention", "sliding_attention"
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    # 2 × 32 layers × 4096 × 2 bytes = 524,288; × 32,768 = 17,179,869,184 = 16 GiB
    "article": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        *(524_288, 32_768, 17_179_869_184),
    ),
    # grouped: 2 × 32 × 8 × 128 × 2 = 131,072; × 8,192 = 1,073,741,824
    "llama-3.1-8b": (
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        *(131_072, 8_192, 1_073_741_824),
    ),
    # multi-query: head 4544 / 71 = 64; 2 × 32 × 1 × 64 × 2 = 8,192; × 2,048 = 16,777,216
    "falcon-7b": (
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True},
        *(8_192, 2_048, 16_777_216),
    ),
    # latent: 61 × (512 + 64) × 2 = 70,272; × 4,096 = 287,834,112
    "deepseek-v3": (
        {
            **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
            **{"num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            **{"qk_nope_head_dim": 128, "v_head_dim": 128},
        },
        *(70_272, 4_096, 287_834_112),
    ),
    # 131,072 a token, of which the last 4,096 are held: 536,870,912
    "mistral-7b": (
        {
            **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "sliding_window": 4096},
        },
        *(131_072, 32_768, 536_870_912),
    ),
    # a layer 2 × 8 × 256 × 2 = 8,192; 21 local and 21 global: 172,032 × (4,096 + 8,192) = 2,113,929,216
    "gemma-2-9b": (
        {
            **{"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096},
        },
        *(344_064, 8_192, 2_113_929_216),
    ),
    # a layer 2 × 16 × 128 × 2 = 8,192; every 6th of 62 is global, 10 in all:
    # 52 × 8,192 × 1,024 + 10 × 8,192 × 32,768 = 436,207,616 + 2,684,354,560 = 3,120,562,176
    "gemma-3-27b": (
        {
            "text_config": {
                **{"model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62},
                **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
                "sliding_window": 1024,
            }
        },
        *(507_904, 32_768, 3_120_562_176),
    ),
    # layers 20 to 34 read what earlier ones keep; of the first 20, 4 are global; a layer 2 × 2 × 256 × 2 =
    # 2,048:
    # 16 × 2,048 × 512 + 4 × 2,048 × 32,768 = 16,777,216 + 268,435,456 = 285,212,672
    "gemma-3n-e4b": (
        {
            "text_config": {
                **{"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35},
                **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
                **{"sliding_window": 512, "num_kv_shared_layers": 15},
                "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 7,
            }
        },
        *(40_960, 32_768, 285_212_672),
    ),
    # the window is switched off: 2 × 28 × 4 × 128 × 2 = 57,344; × 32,768 = 1,879,048,192
    "qwen2.5-7b": (
        {
            **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
            **{"num_key_value_heads": 4, "sliding_window": 131_072, "use_sliding_window": False},
        },
        *(57_344, 32_768, 1_879_048_192),
    ),
    # 12 of 48 attend: 12 × 2 × 2 × 256 × 2 = 24,576; × 32,768 = 805,306,368. The others: 32 × 128 × 128 × 4 =
    # 2,097,152, and (2 × 16 × 128 + 32 × 128) × 3 × 2 = 49,152: 36 × 2,146,304 = 77,266,944. Sum 882,573,312
    "qwen3-next-80b-a3b": (
        {
            **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16},
            **{"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        },
        *(24_576, 32_768, 882_573_312),
    ),
    # layers 4, 12, 20, 28 attend: 4 × 2 × 8 × 128 × 2 = 16,384; × 32,768 = 536,870,912. Mamba: 8,192 × 16 × 4
    # = 524,288 and 8,192 × 3 × 2 = 49,152: 28 × 573,440 = 16,056,320. Sum 552,927,232
    "jamba-v0.1": (
        {
            **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
            **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
        },
        *(16_384, 32_768, 552_927_232),
    ),
    # a layer 2 × 8 × 128 × 2 = 4,096; every 4th of 48 is global:
    # 36 × 4,096 × 8,192 + 12 × 4,096 × 32,768 = 1,207,959,552 + 1,610,612,736 = 2,818,572,288
    "llama-4-scout": (
        {
            "text_config": {
                **{"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40},
                **{"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
                "no_rope_layers": [],
            }
        },
        *(196_608, 32_768, 2_818_572_288),
    ),
    # a layer 2 × 8 × 64 × 2 = 2,048; 12 × 2,048 × (128 + 32,768) = 808,452,096
    "gpt-oss-20b": (
        {
            **{"hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64},
            **{"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
            "layer_types": [SLIDING, FULL] * 12,
        },
        *(49_152, 32_768, 808_452_096),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_token_and_of_a_sequence(name: str, tmp_path: Path) -> None:
    config, token, length, sequence = CASES[name]
    typed = {"model_type": CARDS[name].model_type}
    inner = config.get("text_config")
    whole = {"text_config": {**typed, **inner}} if inner else {**typed, **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for card in (read(tmp_path), named(name)):
        cost = Cost(card, Format("fp16"))
        assert (cost.token_bytes(), cost.sequence_bytes(length)) == (token, sequence)


@pytest.mark.parametrize(
    ("form", "token"),
    [
        (Format("fp32"), 262_144),
        (Format("fp8"), 65_536),  # one scale a tensor
        (Format("int8"), 66_560),  # 128 + 2 bytes a head's vector, 2 × 8 of them, 32 layers
        (Format("int4"), 34_816),  # 64 + 4
        (Format("int4", 64), 36_864),  # 64 + 2 × 4
    ],
)
def test_quantised_keys_and_values_with_their_scales(form: Format, token: int) -> None:
    assert Cost(named("llama-3.1-8b"), form).token_bytes() == token


def test_blocks_are_taken_whole() -> None:
    assert Cost(named("llama-3.1-8b"), block=16).sequence_bytes(1000) == 132_120_576  # 1,008 × 131,072
    # a window of 4,096 that begins within a block reaches into 257 of 16: 4,112 × 131,072
    assert Cost(named("mistral-7b"), block=16).sequence_bytes(5000) == 538_968_064
    assert Cost(named("mistral-7b"), block=16).sequence_bytes(4096) == 536_870_912


def test_devices_share_heads_but_no_latent() -> None:
    assert Cost(named("llama-3.1-8b"), tensor_parallel=2).token_bytes() == 65_536
    assert Cost(named("llama-3.1-8b"), tensor_parallel=16).token_bytes() == 16_384  # held twice
    assert Cost(named("deepseek-v3"), tensor_parallel=8).token_bytes() == 70_272


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("llama-3.1-8b", 8.030261248), ("llama-3.1-70b", 70.553706496), ("mistral-7b", 7.241732096)),
    ],
)
def test_weights_of_llamas_are_exact(name: str, billions: float) -> None:
    assert named(name).parameters.total == round(billions * 1e9)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [  # as the models' own cards say
        *(("deepseek-v3", 671, 37), ("qwen3-30b-a3b", 30.5, 3.3), ("llama-4-scout", 109, 17)),
        *(("gpt-oss-20b", 20.9, 3.6), ("jamba-v0.1", 52, 12), ("qwen3-next-80b-a3b", 80, 3)),
        *(("gemma-2-9b", 9.24, 9.24), ("gemma-3-27b", 27.0, 27.0), ("falcon-7b", 6.92, 6.92)),
        *(("smollm2-135m", 0.1345, 0.1345), ("gemma-3n-e4b", 6.87, 6.87), ("deepseek-v2-lite", 15.7, 2.4)),
    ],
)
def test_weights_of_others_are_close(name: str, billions: float, active: float) -> None:
    counted = named(name).parameters
    assert counted.total / 1e9 == pytest.approx(billions, rel=0.02)
    assert counted.active / 1e9 == pytest.approx(active, rel=0.3)


def test_a_step_reads_every_expert_only_when_the_batch_goes_through_all() -> None:
    counted = named("qwen3-30b-a3b").parameters
    assert counted.read(1) == pytest.approx(counted.active)
    assert counted.active < counted.read(8) < counted.read(64) <= counted.total
    assert counted.read(10_000) == pytest.approx(counted.total)


def test_mamba_2_and_layers_that_are_only_an_mlp() -> None:
    config = {
        **{"model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128},
        **{"hybrid_override_pattern": "M-M*-", "ssm_state_size": 128, "mamba_num_heads": 128},
        **{"mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4},
    }
    cost = Cost(decoded(json.dumps(config).encode(), "hybrid", "hybrid"), Format("bf16"))
    # state 128 × 64 × 128 × 4 = 4,194,304; convolution (8,192 + 2 × 8 × 128) × 3 × 2 = 61,440; twice
    states = {line.kind: line.state_bytes for line in cost.lines()}
    assert states == {Kind.STATE: 8_511_488, Kind.NONE: 0, Kind.FULL: 0}
    assert cost.token_bytes() == 4_096


@pytest.mark.parametrize("name", CARDS)
def test_every_built_in_card_has_a_context_and_weights(name: str) -> None:
    card = named(name)
    assert card.context and card.parameters.total > 10**8 and card.parameters.active <= card.parameters.total


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "no config.json"),
        ("[]", "no config.json"),
        ('{"num_hidden_layers": "3"}', "no config.json"),
        ('{"text_config": ' * 5000, "no config.json"),
        ('{"num_hidden_layers": 1000000000}', "no model has more"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 9, "hidden_size": 8}', "nothing is left"),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": -4, "hidden_size": 8}',
            "'num_key_value_heads' is -4",
        ),
        ("{}", "'num_hidden_layers' is missing"),
        ('{"num_hidden_layers": 2}', "'num_attention_heads' is missing"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4}', "'hidden_size' is missing"),
        (
            '{"num_hidden_layers": -2, "num_attention_heads": 4, "hidden_size": 8}',
            "'num_hidden_layers' is -2",
        ),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "model_type": "llama"}',
            "'hidden_size' is missing",
        ),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "hidden_size": 0, '
            '"model_type": "llama"}',
            "'hidden_size' is 0",
        ),
        *(
            (
                LLAMA_LIKE.replace("{", f'{{"model_type": "llama", "intermediate_size": {sizes}, '),
                "'intermediate_size' is",
            )
            for sizes in ("[]", "[1]", "[1, 1, 1]", "[1, 0]", "[1, -1]")
        ),
        (
            LLAMA_LIKE.replace(
                "{", '{"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": [1], '
            ),
            "no_rope_layers of 1",
        ),
        ('{"is_encoder_decoder": true}', "only decoders"),
        ('{"layer_types": ["holographic"]}', "layer 0 is 'holographic'"),
        ('{"layer_types": ["mamba"], "hidden_size": 8}', "mamba_d_state"),
        ('{"layer_types": ["linear_attention"], "hidden_size": 8}', "linear_num_key_heads"),
        ('{"layer_types": ["mlp"], "num_hidden_layers": 2}', "2 layers, and the kinds of 1"),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 3, "hidden_size": 8}',
            "do not divide",
        ),
        ('{"layer_types": ["mlp"], "num_kv_shared_layers": 1}', "num_kv_shared_layers"),
        (
            '{"layer_types": ["sliding_attention"], "hidden_size": 8, "num_attention_heads": 2}',
            "sliding_window",
        ),
        (
            LLAMA_LIKE.replace("{", '{"model_type": "weird", '),
            r"config\.json: model_type 'weird' is not known",
        ),
        (LLAMA_LIKE.replace("{", '{"model_type": "lama", '), "did you mean 'llama'"),
        ('{"model_type": "mamba2"}', "model_type 'mamba2' is not known"),
        (LLAMA_LIKE, "'model_type' is missing"),
        ('{"model_type": "gemma3", "text_config": ' + LLAMA_LIKE + "}", "'model_type' is missing"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decoded(config.encode(), "model", "config.json")
