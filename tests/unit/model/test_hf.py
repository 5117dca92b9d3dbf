"""Any family comes out as in transformers' own forward, or is refused; nothing of a folder is executed."""

import json
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from tiny_hf import COMMON, FAMILIES, LEAN, VOCAB, eager, rows, tiny
from torch import Tensor

from rollwright.errors import ConfigError, EngineError, MissingExtra
from rollwright.model.attention import causal, positions
from rollwright.model.base import Model
from rollwright.model.decoder import Decoder
from rollwright.model.hf import HFModel, load

pytestmark = pytest.mark.needs("transformers")

LENGTHS = (4, 23, 9)
TOLERANCE = 1e-5


@torch.inference_mode()
def ours(model: Model, each: list[Tensor], keep: Tensor | None = None) -> Tensor:
    lengths = [len(row) for row in each]
    hidden = model.forward(torch.cat(each), positions(lengths), causal(lengths, model.shape), keep)
    return model.logits(hidden)


def saved(lm: Any, folder: Path, **changes: Any) -> Path:
    """The folder of a model, with changes to its `config.json`."""
    lm.save_pretrained(folder)
    card = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(card | changes))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_the_model_itself(name: str) -> None:
    lm, each = tiny(name), rows(LENGTHS)
    expected = eager(lm, each)
    model = HFModel(lm)
    assert expected.std() > 0.01
    assert (ours(model, each) - expected).abs().max() <= TOLERANCE
    kept = torch.tensor([0, 3, 30])
    assert (ours(model, each, kept) - expected[kept]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_gives_the_same_on_the_faster_way_where_there_is_one(name: str, tmp_path: Path) -> None:
    lm, each = tiny(name), rows((*LENGTHS, 120))
    expected = eager(lm, each)
    model = load(saved(lm, tmp_path))
    assert isinstance(model, Decoder if name in LEAN else HFModel)
    assert (ours(model, each) - expected).abs().max() <= TOLERANCE
    assert model.vocab == VOCAB


def test_the_shape_is_what_the_layers_do() -> None:
    shape = HFModel(tiny("gemma3_text")).shape
    assert shape.windows == (5, None, 5)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.context) == (3, 4, 2, 8, 128)
    assert shape.scale == 256**-0.5  # its query_pre_attn_scalar
    assert HFModel(tiny("gpt_neox")).shape.kv_heads == 4


def test_longrope_keeps_to_what_does_not_depend_on_the_longest_row() -> None:
    factors = [1.0, 1.5, 2.0, 3.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    lm = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert HFModel(lm).shape.context == 32


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma3_text"])
def test_each_weight_is_named_once(name: str) -> None:
    lm = tiny(name)
    named = dict(HFModel(lm).named_parameters())
    assert len({tensor.data_ptr() for tensor in named.values()}) == len(named)
    assert {tensor.data_ptr() for tensor in named.values()} == {
        tensor.data_ptr() for tensor in lm.state_dict().values()
    }


def test_gradients_flow_through_our_attention() -> None:
    lm, (row,) = tiny("qwen3"), rows([9])
    lm(input_ids=row[None], use_cache=False).logits.square().mean().backward()
    expected = {name: parameter.grad for name, parameter in lm.named_parameters()}
    lm.zero_grad(set_to_none=True)
    model = HFModel(lm)
    hidden = model.forward(row, positions([9]), causal([9], model.shape))
    model.logits(hidden).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert expected[name] is not None and parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], atol=1e-6), name


def test_models_in_one_process_keep_their_attention_apart() -> None:
    """One model runs inside the attention of another, and a third in a thread meanwhile."""
    inner, outer, (row,) = HFModel(tiny("llama")), HFModel(tiny("mistral", seed=5)), rows([9])
    alone, apart = ours(inner, [row]), ours(outer, [row])
    seen = [causal([9], outer.shape)]
    found: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        thread = Thread(target=lambda: found.append(ours(inner, [row])))
        thread.start()
        thread.join()
        found.append(ours(inner, [row]))
        return seen[0](layer, q, k, v)

    with torch.inference_mode():
        nested = outer.logits(outer.forward(row, positions([9]), attend))
    assert torch.equal(nested, apart)
    assert len(found) == 6 and all(torch.equal(each, alone) for each in found)


def test_a_model_taken_over_says_so() -> None:
    lm, (row,) = tiny("llama"), rows([9])
    HFModel(lm)
    with pytest.raises(EngineError, match="forward"):
        lm(input_ids=row[None], use_cache=False)


@pytest.mark.parametrize(
    ("kind", "settings", "what"),
    [
        ("gemma2", {"head_dim": 8}, "softcapped"),
        ("gpt_oss", {"head_dim": 8}, "sinks"),
        ("deepseek_v3", {"n_routed_experts": 8, "first_k_dense_replace": 9}, "latent"),
        ("mamba", {}, "linear_attention"),
        ("qwen3_next", {"head_dim": 8}, "linear_attention"),
        ("bloom", {}, "those with attention are"),
        ("bart", {"is_encoder_decoder": False}, "those with attention are"),
        ("diffllama", {}, "those with attention are"),
        ("llama", {"is_causal": False}, "sees ahead"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(kind: str, settings: dict[str, Any], what: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **settings}))
    with pytest.raises(ConfigError, match=what) as refused:
        HFModel(lm)
    assert type(lm).__name__ in str(refused.value)


def test_what_nobody_foresaw_is_found_by_comparing() -> None:
    lm = tiny("llama")
    own, scale = lm.model.layers[1].self_attn.forward, torch.tensor(1.5)

    def odd(*args: Any, **kwargs: Any) -> Any:  # as if a family did something in its eager attention only
        out, weights = own(*args, **kwargs)
        return (out * scale if lm.config._attn_implementation == "eager" else out), weights

    lm.model.layers[1].self_attn.forward = odd
    with pytest.raises(ConfigError, match="differ by"):
        HFModel(lm)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_weights_that_are_missing_are_not_made_up(name: str, tmp_path: Path) -> None:
    saved(tiny(name), tmp_path, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    with pytest.raises(ConfigError, match=r"layers\.3"):
        load(tmp_path)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    for name in ("llama", "olmo2"):
        lm = tiny(name)
        lm.save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        torch.save(lm.state_dict(), tmp_path / name / "pytorch_model.bin")
        with pytest.raises(ConfigError, match="safetensors"):
            load(tmp_path / name)


def test_code_in_a_folder_is_not_executed(tmp_path: Path) -> None:
    code = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass C: pass\nclass M: pass\n"
    for kind in ("olmo2", "made_up"):
        folder = saved(tiny("olmo2"), tmp_path / kind, model_type=kind)
        auto = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
        saved_card = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved_card | {"auto_map": auto}))
        (folder / "own.py").write_text(code)
        if kind == "olmo2":
            assert isinstance(load(folder), HFModel)
        else:
            with pytest.raises(ConfigError):
                load(folder)
        assert not (folder / "ran").exists()


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        load(tmp_path)
    saved(tiny("llama"), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_damaged_files_are_refused(name: str, file: str, tmp_path: Path) -> None:
    saved(tiny(name), tmp_path)
    (tmp_path / file).write_bytes(b'{"model_type": "llama", ')
    if file.endswith("index.json") and name == "olmo2":
        (tmp_path / "model.safetensors").unlink()  # else transformers takes it and asks no index
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)


def test_half_precision_takes_the_models_own_code(tmp_path: Path) -> None:
    lm, each = tiny("llama"), rows(LENGTHS)
    model = load(saved(lm, tmp_path), dtype=torch.bfloat16)
    assert isinstance(model, HFModel)
    found, expected = ours(model, each), eager(lm, each)
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tiny("llama"), tmp_path / "llama")
    saved(tiny("olmo2"), tmp_path / "olmo2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(load(tmp_path / "llama"), Decoder)
    with pytest.raises(MissingExtra, match=r"rollwright\[hf\]"):
        load(tmp_path / "olmo2")
