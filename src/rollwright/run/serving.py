"""What `rollwright serve` serves: a run's newest checkpoint, a Hugging Face model, or a fresh one.

Role: from a run folder, a Hugging Face folder or a configuration to an engine and its text. Neighbours: the
command line serves what this builds. Invariants: a run's weights are those of its last commit, checked
against their digest; the folder is read, never written, but for the address file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.clock import Clock
from rollwright.config import RunConfig
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.serve.completions import TextModel
from rollwright.errors import ConfigError
from rollwright.events import Sink
from rollwright.run.evaluation import newest
from rollwright.run.folder import RunFolder
from rollwright.run.preflight import taskset
from rollwright.types import PolicyVersion

if TYPE_CHECKING:
    from rollwright.model.decoder import Decoder
    from rollwright.model.tokenizer import PieceTokenizer


CAPPED, LATENT = "softcapped attention scores", "multi-head latent attention (MLA)"
STATES, ENCODER = "layers without attention", "an encoder"
UNSERVED = {
    "gemma2": CAPPED,
    "gpt_oss": "attention sinks",
    **dict.fromkeys(("llama4", "llama4_text"), "chunked attention"),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "layers that share their KV"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), LATENT),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "nemotron_h", "qwen3_next"), STATES
    ),
    **dict.fromkeys(("bart", "t5", "mt5", "whisper"), ENCODER),
}
"""Model types that `model.hf` does not cover (its docstring has the list) by why."""


@dataclass(frozen=True)
class Policy:
    """An engine, not started, and what the server says of it."""

    engine: Engine
    text: TextModel
    version: PolicyVersion
    weights: Path | None
    """Where new weights for it would lie."""


def of_run(folder: RunFolder, clock: Clock, events: Sink, device: str | None = None) -> Policy:
    """The newest checkpoint of the run in `folder`, on `device` instead of the one that the run used.

    Raises:
        ConfigError: no run folder, nothing committed yet, or no such device.
        StoreError, SchemaError: what the run left is damaged, or of another version.
    """
    config = folder.load()
    last, state = newest(folder, config, clock)

    import torch

    from rollwright.model.tokenizer import PieceTokenizer
    from rollwright.trainer.torch_trainer import TorchTrainer

    torch.set_num_threads(1)
    try:
        codec = PieceTokenizer.from_json(folder.tokenizer.read_text())
    except OSError as error:
        raise ConfigError(f"{folder.tokenizer}: cannot be read ({error.strerror})") from error
    decoder = _decoder(config, codec.size)
    TorchTrainer(decoder, config.trainer).restore(state)
    engine = _engine(config, device)
    return _policy(engine, decoder, codec, last.version, clock, events, folder.blobs / "weights")


def fresh(config: RunConfig, clock: Clock, events: Sink, device: str | None = None) -> Policy:
    """A model of `config` with random weights, the same ones for the same seed.

    Raises:
        ConfigError: rows that don't fit into the model's context, or no such device.
    """
    tasks = taskset(config)

    import torch

    from rollwright.agents.template import CONTROL
    from rollwright.model.tokenizer import PieceTokenizer

    torch.set_num_threads(1)
    codec = PieceTokenizer(tasks.pieces(), CONTROL)
    version, engine = PolicyVersion(run="fresh"), _engine(config, device)
    return _policy(engine, _decoder(config, codec.size), codec, version, clock, events, None)


def of_folder(path: Path, clock: Clock, events: Sink, device: str | None = None) -> Policy:
    """A Hugging Face model with its tokenizer, in float32; nothing in the folder is executed.

    Raises:
        ConfigError: not such a folder, a model that we don't serve, or no such device.
    """
    import torch

    from rollwright.model.hf import load
    from rollwright.model.hf_tokenizer import HfTokenizer
    from rollwright.run.device import device as usable
    from rollwright.run.device import on

    refused(path)
    torch.set_num_threads(1)
    codec = HfTokenizer.from_folder(path)
    version, vocabulary = PolicyVersion(run=path.resolve().name), codec.vocabulary()
    chosen = on(EmbeddedConfig(), device)
    model = load(path, usable(chosen))
    engine = chosen.build(model, version, clock, events, None, vocabulary)
    text = TextModel(name=version.run, vocabulary=vocabulary, encode=codec.encode, end=_ends(path))
    return Policy(engine, text, version, None)


def is_model(path: Path) -> bool:
    """Whether a folder holds a Hugging Face model rather than a run."""
    return (path / "config.json").is_file() and bool({"model_type", "architectures"} & _table(path).keys())


def refused(path: Path) -> None:
    """Refuse a model whose config.json says already that it isn't served, before its weights are read; what
    is left, `model.hf` refuses.

    Raises:
        ConfigError: names its type and what of it isn't served.
    """
    table = _table(path)
    kind = str(table.get("model_type", ""))
    why = UNSERVED.get(kind)
    if why == CAPPED and table.get("attn_logit_softcapping", CAPPED) is None:
        return
    if why is not None:
        raise ConfigError(f"{path}: models of the type '{kind}' are not served: they have {why}")


def _ends(path: Path) -> tuple[int, ...]:
    """The ids that end a completion of a Hugging Face model."""
    generation = _table(path, "generation_config.json")
    found = generation.get("eos_token_id", _table(path).get("eos_token_id"))
    return tuple(each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int))


def _table(path: Path, name: str = "config.json") -> dict[str, Any]:
    try:
        found = json.loads((path / name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _decoder(config: RunConfig, vocab: int) -> Decoder:
    import torch

    from rollwright.model.decoder import Decoder

    decoder = Decoder(config.model, vocab)
    decoder.initialise(torch.Generator().manual_seed(config.seed))
    return decoder


def _engine(config: RunConfig, device: str | None) -> EmbeddedConfig:
    """The engine of the configuration, on `device` where one is given; a run whose engine is elsewhere is
    served by our own."""
    from rollwright.run.device import on

    chosen = config.engine if isinstance(config.engine, EmbeddedConfig) else EmbeddedConfig()
    return on(chosen, device)


def _policy(
    chosen: EmbeddedConfig,
    decoder: Decoder,
    codec: PieceTokenizer,
    version: PolicyVersion,
    clock: Clock,
    events: Sink,
    weights: Path | None,
) -> Policy:
    """What serves `decoder`, whose weights are `version`."""
    from rollwright.agents.template import PieceTemplate
    from rollwright.run.device import device, placed

    model = placed(decoder, device(chosen))
    engine = chosen.build(model, version, clock, events, None, codec.vocabulary())
    text = TextModel(
        name=version.run,
        vocabulary=codec.vocabulary(),
        encode=codec.encode,
        end=PieceTemplate(codec).stop,
    )
    return Policy(engine, text, version, weights)
