"""Any Hugging Face decoder as a `Model`: transformers' own code, with our attention in it.

Role: what checkpoints run on that our decoder doesn't know; `load` picks the faster of the two where both
give the same. Neighbours: `lean` reads known families into `decoder`; `traced` finds the shape and says
what can't be served. Invariant: the attention of a forward is the one handed to that forward, whatever else
runs in the process; nothing is downloaded and no code of the folder is executed.

Does not cover: encoders and cross-attention, layers without attention (Mamba, linear attention, mixed
ones), MLA, softcapped scores (Gemma 2), sinks (gpt-oss), chunked attention (Llama 4), KV shared between
layers (Gemma 3n), adapters, quantised weights. They are refused when the model is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.errors import ConfigError, EngineError, MissingExtra
from rollwright.model import lean
from rollwright.model.traced import Call, Probe, check_config, gather_nothing, probe, shape_of

if TYPE_CHECKING:
    from torch.nn import Parameter

    from rollwright.model.base import Attend, Model

NAME = "rollwright"
"""Of our attention in transformers' table of attention functions; the function itself holds no state."""

_attend: ContextVar[Attend] = ContextVar("attend")
_given: ContextVar[Tensor | None] = ContextVar("given", default=None)
_calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


def load(folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """The model of a folder (`config.json`, safetensors), in evaluation mode: our own decoder for float32
    Llama, Mistral, Qwen 2 and Qwen 3, transformers' code for others.

    Raises:
        ConfigError: no such folder, no safetensors, or a model that isn't served; says why.
        MissingExtra: transformers is needed and not installed.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{folder} holds an adapter: merge it into its model and save that")
    if dtype == torch.float32 and (found := lean.load(folder, device)) is not None:
        return found
    return HFModel.load(folder, device, dtype)


class HFModel:
    """A causal language model of transformers behind the `Model` seam. It takes `lm` over, whose own
    `generate` and `forward` no longer work.

    The whole of transformers' own code runs, from the embedding to the last hidden state in `forward` and
    from there to the scores in `logits` (scales and caps included); only what its attention layers do with
    queries, keys and values is ours.

    Raises:
        ConfigError: something in it that a flat list of tokens with a KV cache can't do, or that comes out
            other than in transformers' own forward.
    """

    def __init__(self, lm: Any) -> None:
        _register()
        self.lm = lm.eval()
        check_config(lm)
        self._base = lm.get_decoder()
        self._whole = self._base.forward
        self._output: type[Any] | None = None
        try:
            expected = probe(lm)
            lm.set_attn_implementation(NAME)
            self._base.forward = self._trunk
            self.shape = shape_of(lm, self._traced(expected))
            self.vocab = int(expected.logits.shape[-1])
            expected.compare(self)
        except ConfigError:
            raise
        except Exception as error:  # boundary: a family's own code, which may want what we don't give
            raise ConfigError(f"{type(lm).__name__} is not served: {error!r}") from error

    @torch.no_grad()
    def _traced(self, rows: Probe) -> list[Call]:
        """The attention calls of one forward."""
        calls: list[Call] = []
        token = _calls.set(calls)
        try:
            self.forward(rows.ids, rows.positions, gather_nothing)
        finally:
            _calls.reset(token)
        return calls

    @classmethod
    def load(
        cls, folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> HFModel:
        """From a folder; see `load`."""
        auto = _transformers().AutoModelForCausalLM
        try:
            lm, info = auto.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                attn_implementation="eager",
            )
        except Exception as error:  # boundary: transformers' own code, on files that may be anything
            raise ConfigError(f"{folder} can't be loaded: {error}") from error
        for what, names in (("lack", info["missing_keys"]), ("do not fit at", info["mismatched_keys"])):
            if names:
                raise ConfigError(f"{folder}: the weights {what} {', '.join(sorted(map(str, names)))}")
        return cls(lm.to(device))

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """See `model.base.Model`."""
        token = _attend.set(attend)
        try:
            found = self._base(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        finally:
            _attend.reset(token)
        hidden: Tensor = found.last_hidden_state[0]
        return hidden if keep is None else hidden.index_select(0, keep)

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """See `model.base.Model`."""
        token = _given.set(hidden[None])
        try:
            found = self.lm(inputs_embeds=hidden[None], use_cache=False)
        finally:
            _given.reset(token)
        scores: Tensor = found.logits[0]
        return scores

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Name, as transformers has it, and tensor of each weight, tied ones once."""
        yield from self.lm.named_parameters()

    def _trunk(self, *args: Any, **kwargs: Any) -> Any:
        """The base model's forward; inside `logits` what it would return, which is given already."""
        given = _given.get()
        if given is None:
            found = self._whole(*args, **kwargs)
            self._output = self._output or type(found)
            return found
        assert self._output is not None, "the constructor ran a forward"
        return self._output(last_hidden_state=given)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention layers call: q[1, H, N, D], k and v[1, Hkv, N, D] → [1, N, H, D]."""
    layer = module.layer_idx
    if (calls := _calls.get()) is not None:
        calls.append(
            Call(
                layer=layer,
                heads=query.shape[1],
                kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
                window=sliding_window,
                masked=attention_mask is not None,
                others=tuple(sorted(name for name, value in others.items() if value is not None)),
            )
        )
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    attend = _attend.get(None)
    if attend is None:
        raise EngineError(f"{type(module).__name__} runs through `HFModel.forward` only")
    return attend(layer, q, k, v)[None], None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("a Hugging Face model", "hf") from error
    return transformers


def _register() -> None:
    """Enter our attention into transformers' table; again is the same. No mask function of that name is
    entered, so transformers makes no masks for it."""
    _transformers().AttentionInterface.register(NAME, _attention)
