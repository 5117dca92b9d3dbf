"""Where the engine computes: what is refused, and whose weights are whose."""

from __future__ import annotations

import pytest
import torch

from rollwright.config import load
from rollwright.engine.config import EmbeddedConfig, RemoteConfig
from rollwright.errors import ConfigError
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.run.device import device, on, placed, present


def decoder() -> Decoder:
    made = Decoder(ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn=32, context=32), 40)
    made.initialise(torch.Generator().manual_seed(0))
    return made


def test_on_the_cpu_the_engine_has_the_trainers_own_weights() -> None:
    ours = decoder()
    assert placed(ours, device(EmbeddedConfig())) is ours
    assert device(RemoteConfig(url="http://127.0.0.1:1")).type == "cpu"


def test_elsewhere_the_engine_has_a_copy_and_the_trainers_stays() -> None:
    ours = decoder()
    theirs = placed(ours, torch.device("meta"))
    assert theirs is not ours and {p.device.type for p in theirs.parameters()} == {"meta"}
    assert {p.device.type for p in ours.parameters()} == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda:7' cannot be used here: .") as found:
        device(EmbeddedConfig(device="cuda:7"))
    assert "\n" not in str(found.value)


@pytest.mark.gpu
def test_a_model_on_an_accelerator_says_what_it_says_on_the_cpu() -> None:
    from rollwright.model.attention import causal, positions

    ours = decoder()
    theirs = placed(ours, device(EmbeddedConfig(device="cuda")))
    ids, place, attend = torch.arange(20), positions((20,)), causal((20,), ours.shape)
    with torch.inference_mode():
        expected = ours.logits(ours(ids, place, attend))
        found = theirs.logits(theirs(ids.cuda(), place.cuda(), attend)).cpu()
    assert (found - expected).abs().max() < 1e-4


def test_coupled_mode_and_names_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda'.*mode = 'async'"):
        load([], ["mode=coupled", "engine.device=cuda"])
    assert load([], ["engine.device=cuda:1"]).engine.device == "cuda:1"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"engine\.device"):
        load([], ["engine.device=tpu"])


def test_the_device_of_the_command_line_takes_the_place_of_the_engines() -> None:
    engine = EmbeddedConfig(max_batch=3)
    assert on(engine, None) is engine
    assert on(engine, "cuda:1") == EmbeddedConfig(max_batch=3, device="cuda:1")
    with pytest.raises(ConfigError, match="--device 'foo': expected cpu"):
        on(engine, "foo")


def test_what_is_on_the_cpu_or_elsewhere_is_present() -> None:
    present(EmbeddedConfig())
    present(RemoteConfig(url="http://127.0.0.1:1"))
    for name in ("cuda:63", "cuda:4000"):
        with pytest.raises(ConfigError, match=rf"engine\.device = '{name}' cannot be used here"):
            present(EmbeddedConfig(device=name))
