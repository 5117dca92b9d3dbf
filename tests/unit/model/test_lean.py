"""Checkpoints in our own decoder: old and new files, shards, and what is left to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import LEAN, LLAMA3, eager, rows, tiny

from rollwright.errors import ConfigError
from rollwright.model.attention import causal, positions
from rollwright.model.lean import load

pytestmark = pytest.mark.needs("transformers")


def edited(folder: Path, **changes: Any) -> Path:
    """`config.json` with changes; None takes a key out."""
    card = json.loads((folder / "config.json").read_text()) | changes
    card = {key: value for key, value in card.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(card))
    return folder


def reweighed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The weights with changes; None takes a tensor out."""
    state = load_file(folder / "model.safetensors") | tensors
    save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors")
    return folder


def gap(lm: Any, folder: Path, length: int = 100) -> float:
    """Largest difference between the decoder of the folder and `lm`."""
    decoder, each = load(folder), rows([length])
    assert decoder is not None
    with torch.inference_mode():
        hidden = decoder(each[0], positions([length]), causal([length], decoder.shape))
        return float((decoder.logits(hidden) - eager(lm, each)).abs().max())


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("stretch", [None, LLAMA3], ids=["plain", "stretched"])
def test_older_files_state_the_rotation_elsewhere(stretch: Any, theta: float, tmp_path: Path) -> None:
    rope = {**(stretch or {"rope_type": "default"}), "rope_theta": theta}
    lm = tiny("llama", rope_parameters=rope)
    lm.save_pretrained(tmp_path)
    older = {key: value for key, value in (stretch or {}).items() if key != "rope_theta"}
    edited(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=older or None)
    assert gap(lm, tmp_path) <= 1e-5


def test_older_files_of_qwen_have_no_layer_types(tmp_path: Path) -> None:
    lm = tiny("qwen2")
    lm.save_pretrained(tmp_path)
    edited(tmp_path, layer_types=None, use_sliding_window=False, sliding_window=4)
    assert gap(lm, tmp_path) <= 1e-5


def test_shards_are_read_and_other_files_beside_them_are_not(tmp_path: Path) -> None:
    lm = tiny("llama")
    lm.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert gap(lm, tmp_path) <= 1e-5


@pytest.mark.parametrize("name", LEAN)
def test_the_decoder_is_trained_by_the_same_gradients(name: str, tmp_path: Path) -> None:
    lm, (row,) = tiny(name), rows([30])
    lm.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert decoder is not None
    lm(input_ids=row[None], use_cache=False).logits.square().mean().backward()
    hidden = decoder(row, positions([30]), causal([30], decoder.shape))
    decoder.logits(hidden).square().mean().backward()
    attention = lm.model.layers[1].self_attn
    expected = torch.cat(
        [each.weight.grad for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    )
    found = decoder.blocks[1].qkv.weight.grad
    assert expected.abs().max() > 1e-6
    assert torch.allclose(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"model_type": "olmo2"}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"is_causal": False}),
        ("llama", {"num_key_value_heads": None}),  # not stated
        ("llama", {"rope_parameters": None}),
        ("llama", {"tie_word_embeddings": None}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": None, "layer_types": None}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
        ("qwen3", {"head_dim": None}),
        ("qwen3", {"attention_bias": True}),
    ],
    ids=str,
)
def test_what_it_does_not_do_exactly_is_left_to_others(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny(name).save_pretrained(tmp_path)
    assert load(tmp_path) is not None
    assert load(edited(tmp_path, **changes)) is None


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lack model\.layers\.1\.mlp\.up_proj"),
        ({"model.norm.weight": torch.ones(5)}, "expected"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "no place for"),
        ({"lm_head.weight": None}, "lack lm_head"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tensors: Any, what: str, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=what):
        load(reweighed(tmp_path, **tensors))


def test_a_file_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"\.\./model"):
        load(tmp_path / "model")
