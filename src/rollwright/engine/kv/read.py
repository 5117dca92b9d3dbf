"""From a model's config.json to a `Card`.

Role: reads what each layer keeps, as the model's own code would build it. Neighbours: `raw` has the keys,
`families` the known types, `weights` counts parameters. Invariants: nothing of the file is executed; what is
not understood is refused by name, never guessed. Sources: the `configuration_*.py` of transformers 5.24 for
the defaults of each `model_type`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollwright.engine.kv.card import Card, Kind, Layer
from rollwright.engine.kv.families import understood
from rollwright.engine.kv.raw import Raw
from rollwright.engine.kv.states import linear, mamba
from rollwright.engine.kv.weights import count
from rollwright.errors import ConfigError

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NAMES = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.WINDOW,
    "chunked_attention": Kind.CHUNK,
    "linear_attention": Kind.STATE,
    "mamba": Kind.STATE,
    "mlp": Kind.NONE,
    "moe": Kind.NONE,
}
"""What `layer_types` and `layers_block_type` call a layer."""
PATTERN = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""
TIED = ("gemma", "falcon", "gpt2", "cohere")
"""Families whose files leave `tie_word_embeddings` out and mean true."""
LAYERS = 10_000
GEMMA3 = (8, 4, 256)
"""Heads, KV heads and head size of `gemma3_text` where the file leaves them out, as Google's do."""


def read(path: Path) -> Card:
    """The model whose config.json `path` is, or is the folder of.

    Raises:
        ConfigError: no such file, no JSON, or a model whose memory is not understood.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}): give a config.json or its folder"
        ) from error
    return decoded(data, file.parent.name if file.name == "config.json" else file.stem, str(file))


def decoded(data: bytes, name: str, where: str) -> Card:
    """The model that the JSON `data` describes; `where` names it in errors.

    Raises:
        ConfigError: as `read`.
    """
    try:
        raw = msgspec.json.decode(data, type=Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: no config.json of a model: {error}") from error
    return card(raw, name, where)


def card(outer: Raw, name: str, where: str) -> Card:
    """The `Card` of parsed keys; of a model with several parts that of its text.

    Raises:
        ConfigError: a key is missing, or a model whose memory is not understood.
    """
    raw = outer.text_config or outer
    if outer.is_encoder_decoder or raw.is_encoder_decoder:
        raise ConfigError(f"{where}: an encoder and a decoder; only decoders are planned for")
    for key in raw.__struct_fields__:
        value = getattr(raw, key)
        if isinstance(value, int) and not 0 <= value < 2**40:
            raise ConfigError(f"{where}: '{key}' is {value}; it decides about memory")
    if raw.model_type:
        understood(raw.model_type, where)
    layers = _layers(raw, where)
    understood(raw.model_type, where)  # a file without a type is first told what else it lacks
    _weighed(raw, len(layers), where)
    notes = []
    if any(layer.kind is Kind.STATE for layer in layers):
        notes.append("recurrent states: a prefix is found only where a state of it was kept")
    told = raw.dtype or raw.torch_dtype or outer.dtype or outer.torch_dtype or "bfloat16"
    return Card(
        name=name,
        layers=layers,
        context=raw.max_position_embeddings or raw.n_positions or 0,
        parameters=count(raw, layers, _tied(outer, raw)),
        dtype=DTYPES.get(told, "bf16"),
        quantised=bool(outer.quantization_config or raw.quantization_config),
        notes=tuple(notes),
    )


def _tied(outer: Raw, raw: Raw) -> bool:
    """Whether head and embedding are one; where the file is silent, as the family does by default."""
    for said in (raw.tie_word_embeddings, outer.tie_word_embeddings):
        if said is not None:
            return said
    return raw.model_type.startswith(TIED)


def width(raw: Raw, where: str) -> int:
    """Width of the residual stream.

    Raises:
        ConfigError: the file does not say.
    """
    return _needed(raw.n_embd if raw.hidden_size is None else raw.hidden_size, "hidden_size", where)


def _weighed(raw: Raw, layers: int, where: str) -> None:
    """Raises `ConfigError` where the file does not say what its weights are counted from."""
    width(raw, where)
    sizes = raw.intermediate_size
    if isinstance(sizes, list) and (len(sizes) != layers or not all(0 < each < 2**40 for each in sizes)):
        raise ConfigError(
            f"{where}: 'intermediate_size' is {str(sizes)[:80]}; expected a size for each of {layers} layers"
        )


def _layers(raw: Raw, where: str) -> tuple[Layer, ...]:
    """What each layer keeps."""
    names = _names(raw, where)
    made = []
    for index, name in enumerate(names):
        kind = NAMES.get(name)
        if kind is None:
            raise ConfigError(
                f"{where}: layer {index} is '{name}', which is not known here; known: {', '.join(NAMES)}"
            )
        if kind is Kind.STATE:
            made.append(
                linear(raw, where) if name == "linear_attention" else mamba(raw, width(raw, where), where)
            )
        elif kind is Kind.NONE:
            made.append(Layer(kind))
        else:
            made.append(_attention(raw, kind, where))
    shared = raw.num_kv_shared_layers or 0
    if not 0 <= shared < len(made):
        raise ConfigError(f"{where}: num_kv_shared_layers = {shared}, of {len(made)} layers")
    own = len(made) - shared
    return (*made[:own], *(Layer(Kind.SHARED) for _ in made[own:]))


def _attention(raw: Raw, kind: Kind, where: str) -> Layer:
    """An attention layer: a latent, or heads."""
    if raw.kv_lora_rank:
        rope = _needed(raw.qk_rope_head_dim, "qk_rope_head_dim", where)
        return Layer(Kind.FULL, heads=1, key=raw.kv_lora_rank, value=rope, latent=True)
    heads, kv, size = heads_of(raw, where)
    span = 0
    if kind is Kind.FULL:
        size, kv = raw.global_head_dim or size, raw.num_global_key_value_heads or kv
    elif kind is Kind.WINDOW:
        span = _needed(raw.sliding_window, "sliding_window", where)
    else:
        span = _needed(raw.attention_chunk_size, "attention_chunk_size", where)
    if size < 1:
        raise ConfigError(
            f"{where}: {heads} heads in a width of {width(raw, where)}: nothing is left for one"
        )
    if heads % kv:
        raise ConfigError(f"{where}: {heads} heads do not divide by {kv} KV heads")
    return Layer(kind, heads=kv, key=size, value=raw.v_head_dim or size, span=span)


def heads_of(raw: Raw, where: str) -> tuple[int, int, int]:
    """Query heads, KV heads, size of a head.

    Raises:
        ConfigError: the file does not say.
    """
    usual = GEMMA3 if raw.model_type == "gemma3_text" else (None, None, None)
    heads = _needed(raw.num_attention_heads or raw.n_head or usual[0], "num_attention_heads", where)
    size = raw.head_dim or usual[2] or width(raw, where) // heads
    if raw.multi_query and not raw.new_decoder_architecture:
        return heads, 1, size
    kv = raw.num_key_value_heads or raw.num_kv_heads or raw.n_head_kv or usual[1] or heads
    return heads, kv, size


def _names(raw: Raw, where: str) -> list[str]:
    """What kind each layer is, in the words of `layer_types`."""
    said = raw.num_hidden_layers or raw.n_layer
    names = raw.layer_types or raw.layers_block_type
    if raw.hybrid_override_pattern:
        names = [PATTERN.get(letter, letter) for letter in raw.hybrid_override_pattern]
    if names is not None:
        if said is not None and said != len(names):
            raise ConfigError(f"{where}: {said} layers, and the kinds of {len(names)}")
        return names
    count = _needed(said, "num_hidden_layers", where)
    if count > LAYERS:
        raise ConfigError(f"{where}: {count} layers; no model has more than {LAYERS}")
    if raw.full_attention_interval:
        return [_every(i, raw.full_attention_interval, "linear_attention") for i in range(count)]
    if raw.attn_layer_period:
        offset = raw.attn_layer_offset or 0
        return ["attention" if i % raw.attn_layer_period == offset else "mamba" for i in range(count)]
    if raw.attention_chunk_size:
        local = raw.no_rope_layers or [(i + 1) % (raw.no_rope_layer_interval or 4) for i in range(count)]
        if len(local) != count:
            raise ConfigError(f"{where}: {count} layers, and no_rope_layers of {len(local)}")
        return ["chunked_attention" if each else "full_attention" for each in local]
    if not raw.sliding_window or raw.use_sliding_window is False:
        return ["full_attention"] * count
    return _windows(raw, count)


def _windows(raw: Raw, count: int) -> list[str]:
    """Which of `count` layers slide, where the file gives a window and no list."""
    pattern = raw.sliding_window_pattern
    if isinstance(pattern, str) and pattern:
        letters = [pattern[i % len(pattern)] for i in range(count)]
        return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
    usual = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "gpt_oss": 2}
    every = int(pattern or usual.get(raw.model_type, 0))
    if every:
        return [_every(i, every, "sliding_attention") for i in range(count)]
    first = raw.max_window_layers or 0 if raw.use_sliding_window else 0
    return ["full_attention"] * min(first, count) + ["sliding_attention"] * max(0, count - first)


def _every(index: int, interval: int, other: str) -> str:
    """The last of each `interval` layers sees everything."""
    return other if (index + 1) % interval else "full_attention"


def _needed(value: int | None, key: str, where: str) -> int:
    if not value or value < 0:
        raise ConfigError(
            f"{where}: '{key}' is {'missing' if value is None else value}; it decides about memory"
        )
    return value
