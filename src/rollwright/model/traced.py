"""What a Hugging Face model's attention does, seen by running it, and whether it can be served.

Role: shape and refusals for `hf`. Neighbours: `hf.HFModel` hands in what its attention layers were called
with. Invariant: a model that passes gives, row by row, what transformers' own eager forward gives; what
isn't known to be right is refused, naming what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.model.attention import causal, positions
from rollwright.model.base import Shape

if TYPE_CHECKING:
    from rollwright.model.base import Model

_ROWS = (3, 11)
"""Tokens of the rows that are compared; the longer one grows beyond a small window."""
_LONGEST = 64
"""Windows larger than this are taken as the model's attention says, without a row that exceeds them."""

_REFUSED = {
    "softcap": "softcapped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias by position",
    "cu_seq_lens_q": "packed sequences of its own",
}
"""Arguments of an attention call that `Attend` has no place for."""


@dataclass(frozen=True)
class Call:
    """One call of an attention layer."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    masked: bool
    """Whether a mask was handed in, made by other code than transformers' for plain causal attention."""
    others: tuple[str, ...]
    """Names of further arguments that are not None."""


def check_config(lm: Any) -> None:
    """Refuse what the configuration tells already.

    Raises:
        ConfigError: names the model and what of it isn't served.
    """
    config = lm.config
    for what in _unserved(config):
        raise ConfigError(f"{type(lm).__name__} is not served: it has {what}")


def _unserved(config: Any) -> Iterator[str]:
    """What a configuration says that isn't served."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "an encoder"
    if text is not config:
        yield "parts that are no text decoder; save its language model alone"
    if getattr(text, "quantization_config", None) is not None:
        yield "quantised weights"
    if getattr(text, "attn_logit_softcapping", None):
        yield "softcapped attention scores"
    if getattr(text, "kv_lora_rank", None):
        yield "multi-head latent attention (MLA)"
    if getattr(text, "num_kv_shared_layers", 0):
        yield "layers that share their KV"
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        yield f"layers of the kind {', '.join(sorted(kinds))}"
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        yield "attention that sees ahead"


def shape_of(lm: Any, calls: Sequence[Call]) -> Shape:
    """The shape that one forward's attention calls show.

    Raises:
        ConfigError: they aren't those of equal decoder layers.
    """
    name, text = type(lm).__name__, lm.config.get_text_config()
    if [call.layer for call in calls] != list(range(text.num_hidden_layers)):
        raise ConfigError(
            f"{name} is not served: of its {text.num_hidden_layers} layers those with attention are "
            f"{[call.layer for call in calls]}; every layer has to have it, once and in order"
        )
    first = calls[0]
    for call in calls:
        for other in call.others:
            if other in _REFUSED:
                raise ConfigError(f"{name} is not served: layer {call.layer} has {_REFUSED[other]}")
        if call.masked:
            raise ConfigError(f"{name} is not served: layer {call.layer} brings a mask of its own")
        if call.value_dim != call.head_dim:
            raise ConfigError(
                f"{name} is not served: keys of {call.head_dim} and values of {call.value_dim} numbers a head"
            )
        if (call.heads, call.kv_heads, call.head_dim, call.scale) != (
            first.heads,
            first.kv_heads,
            first.head_dim,
            first.scale,
        ):
            raise ConfigError(f"{name} is not served: layers {first.layer} and {call.layer} differ in shape")
    return Shape(
        layers=len(calls),
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        context=_context(lm),
        scale=first.scale,
        windows=_windows(lm, calls),
    )


def _windows(lm: Any, calls: Sequence[Call]) -> tuple[int | None, ...]:
    """Each layer's window, which configuration and call have to agree on."""
    text = lm.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [None] * len(calls)
    meant = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    if meant and kinds[0] is None and all(call.window is None for call in calls):
        raise ConfigError(
            f"{type(lm).__name__} is not served: its configuration has a sliding window, its attention none"
        )
    for call, kind in zip(calls, kinds, strict=True):
        if kind is not None and (kind == "sliding_attention") != (call.window is not None):
            raise ConfigError(
                f"{type(lm).__name__} is not served: layer {call.layer} is {kind}, "
                f"but its attention is called with the window {call.window}"
            )
    return tuple(call.window for call in calls)


def _context(lm: Any) -> int:
    """Longest row in tokens; of LongRoPE, whose rotation of all tokens changes with the longest row, what
    the short factors are for."""
    text = lm.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not context:
        raise ConfigError(f"{type(lm).__name__} is not served: its configuration has no longest row")
    rope = getattr(text, "rope_parameters", None) or {}
    for part in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        if part.get("rope_type") == "longrope":
            context = min(context, part["original_max_position_embeddings"])
    return int(context)


@dataclass(frozen=True)
class Probe:
    """Rows of tokens and the scores that transformers' own forward gives for them."""

    name: str
    lengths: tuple[int, ...]
    ids: Tensor
    """int64[N], rows back to back."""
    positions: Tensor
    """int64[N]."""
    logits: Tensor
    """[N, vocab]."""

    @torch.no_grad()
    def compare(self, model: Model) -> None:
        """Check that `model` gives the same.

        Raises:
            ConfigError: it doesn't.
        """
        hidden = model.forward(self.ids, self.positions, causal(self.lengths, model.shape))
        found = model.logits(hidden)
        gap = float((found - self.logits).abs().max() / self.logits.abs().max().clamp_min(1e-6))
        allowed = 1e-3 if self.logits.dtype == torch.float32 else 5e-2
        if not gap <= allowed:  # also where it isn't a number
            raise ConfigError(
                f"{self.name} is not served: run through our attention its scores differ by {gap:.2g} of the "
                "largest one from its own forward, so it does something there that isn't covered"
            )


def gather_nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The `Attend` of the forward that only shows the calls."""
    return torch.zeros_like(v).repeat_interleave(q.shape[1] // v.shape[1], 1)


@torch.no_grad()
def probe(lm: Any) -> Probe:
    """What `lm`'s eager forward says, each row alone."""
    text = lm.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    short, long = _ROWS
    if isinstance(window, int) and window <= _LONGEST:
        long = max(long, window + 3)
    device = next(lm.parameters()).device
    vocab = int(text.vocab_size)
    rows = [torch.arange(n, device=device) * 7919 % vocab for n in (short, long)]
    lm.set_attn_implementation("eager")
    scores = [lm(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    return Probe(
        name=type(lm).__name__,
        lengths=(short, long),
        ids=torch.cat(rows),
        positions=positions((short, long), device),
        logits=torch.cat(scores),
    )
