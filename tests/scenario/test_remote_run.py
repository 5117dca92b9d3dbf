"""A run whose engine is served elsewhere, once by one server and once by two."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from in_process import TINY, ran
from opened import until_end
from served import Served

from rollwright.agents.template import CONTROL
from rollwright.archive.reader import opened
from rollwright.clock import SystemClock
from rollwright.config import load
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig, RemoteConfig
from rollwright.engine.remote.address import write
from rollwright.engine.replicas import Replicas
from rollwright.errors import ConfigError
from rollwright.events import NullSink
from rollwright.model.decoder import Decoder
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.run.folder import RunFolder
from rollwright.run.preflight import taskset
from rollwright.types import PolicyVersion

OTHER = PolicyVersion(run="other")


def engine() -> Engine:
    """Of the shape that `TINY` has, with other weights: the run's come by its first update."""
    chosen = load([], TINY)
    codec = PieceTokenizer(taskset(chosen).pieces(), CONTROL)
    decoder = Decoder(chosen.model, codec.size)
    decoder.initialise(torch.Generator().manual_seed(99))
    return EmbeddedConfig().build(decoder, OTHER, SystemClock(), NullSink(), vocabulary=codec.vocabulary())


def served(folder: Path, name: str) -> tuple[Path, Served]:
    """The address file of a real server, and the server."""
    weights, file = folder / f"weights-{name}", folder / f"{name}.json"
    weights.mkdir()
    server = until_end(Served(engine, weights))
    write(file, server.address, weights)
    return file, server


def said(folder: RunFolder) -> dict[str, list[list[int]]]:
    """The rows of every rollout."""
    with closing(opened(folder.rollouts)) as archive:
        names = [line.rollout for line in archive.lines()]
        return {
            line.rollout: [row.tokens.tolist() for row in kept.scored.rollout.rows]
            for line, kept, _ in archive.whole(names)
        }


def test_two_servers_make_the_rollouts_of_one_engine(tmp_path: Path) -> None:
    pairs = [served(tmp_path, name) for name in ("a", "b")]
    files = ", ".join(f'"{file}"' for file, _ in pairs)
    here = ran(tmp_path / "here")
    there = ran(tmp_path / "there", f'engine={{type="remote", addresses=[{files}]}}')
    one, two = said(here), said(there)
    assert one.keys() == two.keys() and len(one) >= 24
    same = sum(one[name] == two[name] for name in one)
    assert same >= 0.9 * len(one), (
        f"{same} of {len(one)}"
    )  # batches differ, and with them the last bit of sums
    for _, server in pairs:
        assert server.sampled() > 0, "one of the two served nothing: the test shows nothing"


def test_a_configuration_names_one_server_or_several(tmp_path: Path) -> None:
    pairs = [served(tmp_path, name) for name in ("a", "b")]
    files = tuple(str(file) for file, _ in pairs)

    def built(config: RemoteConfig) -> Engine:
        return config.build(None, OTHER, SystemClock(), NullSink())

    assert isinstance(built(RemoteConfig(addresses=files)), Replicas)
    assert not isinstance(built(RemoteConfig(address=files[0])), Replicas)
    with pytest.raises(ConfigError, match="no address of a server"):
        built(RemoteConfig(addresses=(files[0], str(tmp_path / "nothing.json"))))
    for wrong in (
        "",
        'address="a", addresses=["b"]',
        'addresses=["a", "a"]',
        'addresses=[""]',
        "addresses=[]",
    ):
        with pytest.raises(ConfigError, match=r"takes one of address|each server's file once"):
            load([], ["engine={" + ", ".join(['type="remote"', *filter(None, [wrong])]) + "}"])
