"""Llama, Mistral, Qwen 2 and Qwen 3 checkpoints in our own decoder, which is faster than the general way.

Role: reads a folder's `config.json` and safetensors without transformers. Neighbours: `hf.load` asks it
first. Invariant: only what the decoder computes exactly is taken; whatever the file leaves open, where a
default of transformers would decide, is not taken either.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import UNSET, Struct, UnsetType
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder, Variant
from rollwright.model.rotary import Stretch

_FULL, _SLIDING = "full_attention", "sliding_attention"


class _Rope(Struct, frozen=True):
    """How positions are rotated; `type` is what older files call `rope_type`."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class _Card(Struct, frozen=True, kw_only=True):
    """What of `config.json` the decoder depends on. A field without a default has to be there."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    vocab_size: int
    hidden_act: str
    tie_word_embeddings: bool
    head_dim: int | UnsetType | None = UNSET
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool | None = None
    layer_types: tuple[str, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    quantization_config: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    is_causal: bool = True


def load(folder: Path, device: torch.device | str = "cpu") -> Decoder | None:
    """The checkpoint as a float32 decoder in evaluation mode; None where the decoder doesn't do exactly what
    it needs.

    Raises:
        ConfigError: a damaged file, no weights there, or they don't fit `config.json`.
    """
    try:
        card = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Card)
    except msgspec.ValidationError:
        return None  # another family, or one that leaves something to defaults
    except msgspec.DecodeError as error:
        raise ConfigError(f"{folder / 'config.json'} is damaged: {error}") from error
    variant = _variant(card)
    if variant is None:
        return None
    rope = card.rope_parameters or card.rope_scaling or _Rope()
    theta = rope.rope_theta or card.rope_theta
    try:
        config = ModelConfig(
            dim=card.hidden_size,
            layers=card.num_hidden_layers,
            heads=card.num_attention_heads,
            kv_heads=card.num_key_value_heads,
            ffn=card.intermediate_size,
            context=card.max_position_embeddings,
            rope_theta=theta or 0.0,
            norm_eps=card.rms_norm_eps,
            tied=card.tie_word_embeddings,
        )
    except ValidationError:
        return None
    decoder = Decoder(config, card.vocab_size, variant)
    try:
        _Weights(folder).fill(decoder)
    except (msgspec.DecodeError, SafetensorError) as error:
        raise ConfigError(f"the weights in {folder} are damaged: {error}") from error
    return decoder.to(device).eval()


def _variant(card: _Card) -> Variant | None:
    """What the checkpoint has beyond a `ModelConfig`; None where the decoder can't have it."""
    if card.model_type not in _WINDOWS or card.hidden_act != "silu":
        return None
    if card.attention_bias or card.mlp_bias or card.quantization_config is not None or not card.is_causal:
        return None
    rope = card.rope_parameters or card.rope_scaling or _Rope()
    if {card.partial_rotary_factor, rope.partial_rotary_factor} - {None, 1.0}:
        return None
    kind, stretch = rope.rope_type or rope.type or "default", None
    if kind == "llama3":
        stretch = _stretch(rope)
    if kind not in {"default", "llama3"} or (kind == "llama3") != (stretch is not None):
        return None
    windows = _WINDOWS[card.model_type](card)
    if windows is None or (card.model_type == "qwen3" and not isinstance(card.head_dim, int)):
        return None
    return Variant(
        head_dim=card.head_dim if isinstance(card.head_dim, int) else None,
        qkv_bias=card.model_type == "qwen2",
        head_norm=card.model_type == "qwen3",
        windows=windows,
        stretch=stretch,
        single=True,
    )


def _stretch(rope: _Rope) -> Stretch | None:
    """Llama 3's stretch, or None where a figure of it is missing."""
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    context = rope.original_max_position_embeddings
    if factor is None or low is None or high is None or context is None:
        return None
    return Stretch(factor, low, high, context)


def _no_windows(card: _Card) -> tuple[int | None, ...] | None:
    return (None,) * card.num_hidden_layers


def _same_window(card: _Card) -> tuple[int | None, ...] | None:
    """Mistral: one window for all layers, to be stated even where there is none."""
    if isinstance(card.sliding_window, UnsetType):
        return None
    return (card.sliding_window,) * card.num_hidden_layers


def _window_of_layers(card: _Card) -> tuple[int | None, ...] | None:
    """Qwen: off unless `use_sliding_window`, and then for the layers that `layer_types` says."""
    if card.use_sliding_window is False:
        return _no_windows(card)
    if card.layer_types is None or len(card.layer_types) != card.num_hidden_layers:
        return None
    window = card.sliding_window
    if set(card.layer_types) == {_FULL}:
        return _no_windows(card)
    if set(card.layer_types) - {_FULL, _SLIDING} or not isinstance(window, int):
        return None
    return tuple(window if each == _SLIDING else None for each in card.layer_types)


_WINDOWS: dict[str, Callable[[_Card], tuple[int | None, ...] | None]] = {
    "llama": _no_windows,
    "mistral": _same_window,
    "qwen2": _window_of_layers,
    "qwen3": _window_of_layers,
}


class _Index(Struct, frozen=True):
    """Which file holds a tensor."""

    weight_map: dict[str, str]


class _Weights:
    """A folder's tensors by name, read when asked for; every one of them has to be asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.is_file():
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        self.source: dict[str, Any] = {}
        for name in sorted(names):
            if Path(name).name != name or not (folder / name).is_file():
                raise ConfigError(f"{folder} has no {name}: weights are read from safetensors only")
            opened: Any = safe_open(folder / name, framework="pt")
            self.source |= dict.fromkeys(opened.keys(), opened)
        self.left = set(self.source)

    def take(self, target: Tensor, name: str) -> None:
        """Copy the tensor of that name into `target`."""
        if name not in self.source:
            raise ConfigError(f"{self.folder}: the weights lack {name}")
        found = self.source[name].get_tensor(name)
        if found.shape != target.shape:
            expected = f"expected {tuple(target.shape)}, got {tuple(found.shape)}"
            raise ConfigError(f"{self.folder}: {name} does not fit config.json: {expected}")
        self.left.discard(name)
        target.copy_(found)

    @torch.no_grad()
    def fill(self, decoder: Decoder) -> None:
        """Copy all into the decoder.

        Raises:
            ConfigError: a tensor is missing, of another shape, or has no place in the decoder.
        """
        shape = decoder.shape
        widths = [n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        own = dict(decoder.named_parameters())
        self.take(own["embed.weight"], "model.embed_tokens.weight")
        self.take(own["norm.weight"], "model.norm.weight")
        if decoder.head is not None:
            self.take(own["head.weight"], "lm_head.weight")
        else:
            self.left.discard("lm_head.weight")  # a copy of the embedding
        for layer in range(shape.layers):
            here, there = f"blocks.{layer}.", f"model.layers.{layer}."
            for ours, theirs in _NAMES:
                if here + ours in own:
                    self.take(own[here + ours], there + theirs)
            for kind in ("weight", "bias"):
                if here + f"qkv.{kind}" in own:
                    parts = torch.split(own[here + f"qkv.{kind}"], widths)
                    for each, part in zip("qkv", parts, strict=True):
                        self.take(part, there + f"self_attn.{each}_proj.{kind}")
            gate, up = own[here + "gate_up.weight"].chunk(2)
            self.take(gate, there + "mlp.gate_proj.weight")
            self.take(up, there + "mlp.up_proj.weight")
        if odd := sorted(name for name in self.left if not name.endswith("rotary_emb.inv_freq")):
            raise ConfigError(f"{self.folder}: weights that this model has no place for: {', '.join(odd)}")


_NAMES = (
    ("attention_norm.weight", "input_layernorm.weight"),
    ("out.weight", "self_attn.o_proj.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("down.weight", "mlp.down_proj.weight"),
    ("head_norm.query", "self_attn.q_norm.weight"),
    ("head_norm.key", "self_attn.k_norm.weight"),
)
"""Ours and theirs, of a layer."""
