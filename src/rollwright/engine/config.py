"""Settings of the inference engines; no torch.

Role: the `[engine]` table. Neighbours: the conductor builds the engine from it. Invariant: building is what
imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollwright.clock import Clock
from rollwright.engine.base import Engine
from rollwright.events import Sink
from rollwright.model.base import Vocabulary
from rollwright.plugins import PartConfig
from rollwright.pool.base import Lease
from rollwright.types import PolicyVersion


class EmbeddedConfig(PartConfig):
    """The engine inside this process: torch, continuous batching, radix KV cache."""

    type: Literal["embedded"] = "embedded"
    """Name of the implementation."""
    max_batch: int = Field(64, ge=1, le=65536)
    """Requests decoded together; more of them wait. Each has a row for the end of its history."""
    row_tokens: int = Field(1024, ge=16)
    """Longest end of a history that lies in a row; what is before it lies in the prefix cache."""
    kv_tokens: int = Field(32768, ge=1)
    """Tokens the prefix cache holds: shared prefixes, long histories and what waits for its next turn. The
    least recently used are evicted beyond that."""
    host_tokens: int = Field(0, ge=0)
    """Tokens that the host-memory tier holds: what the prefix cache evicts goes there and comes back instead
    of being computed again."""
    prefill_tokens: int = Field(512, ge=1)
    """Most prompt tokens computed in one step; longer prompts take several steps."""
    stall: float = Field(1.5, gt=0)
    """How much longer prompts may make a step, as a multiple of what the decoding requests alone need: they
    are cut so that decoding is never starved, but for their last 64 tokens."""
    linger: int = Field(0, ge=0)
    """Steps that requests may wait, while others run, for more to be admitted with: fewer and larger steps,
    so more tokens for the same work, and each request takes longer. 0 admits at once."""
    device: str = Field("cpu", pattern=r"^(cpu|mps|cuda(:[0-9]+)?)$")
    """Where it computes: `cpu`, `cuda`, `cuda:1`, `mps`. In coupled mode, where engine and trainer share
    their weights, `cpu`."""

    def build(
        self,
        model: Any,
        version: PolicyVersion,
        clock: Clock,
        events: Sink,
        lease: Lease | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> Engine:
        """An engine over `model` (a `model.base.Model`), whose weights are `version`. Stop strings and
        constraints need the `vocabulary`."""
        from rollwright.engine.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(model, self, version, clock, events, lease, vocabulary)


class RemoteConfig(PartConfig):
    """An engine, or several as one, that `rollwright serve` runs in other processes or on other machines."""

    type: Literal["remote"] = "remote"
    """Name of the implementation."""
    address: str = ""
    """File that the server wrote: its URLs, its tokens and its weights folder. Without it give `addresses` or
    `url`; with `url` the tokens come from ROLLWRIGHT_TOKEN and ROLLWRIGHT_CONTROL_TOKEN."""
    addresses: tuple[str, ...] = ()
    """Such files of several servers with the same model: each request goes to one of them, where its prefix
    lies, and to another one when that one dies."""
    url: str = ""
    """Public port, for example `http://127.0.0.1:8000`."""
    control_url: str = ""
    """Control port; without one the engine takes no new weights."""
    weights: str = ""
    """Folder that this process and the server share, through which new weights go."""
    silence: float = Field(30.0, gt=0)
    """Seconds without a sign of life after which the server counts as hung."""
    patience: float = Field(30.0, ge=0)
    """Seconds to wait at the start for a server that isn't there yet."""

    @model_validator(mode="after")
    def _somewhere(self) -> RemoteConfig:
        if sum(map(bool, (self.address, self.addresses, self.url))) != 1:
            raise ValueError(
                "engine.type = 'remote' takes one of address (the server's file), addresses (several) and url"
            )
        if len(set(self.addresses)) < len(self.addresses) or "" in self.addresses:
            raise ValueError(f"engine.addresses = {list(self.addresses)}: name each server's file once")
        return self

    def build(
        self,
        model: Any,
        version: PolicyVersion,
        clock: Clock,
        events: Sink,
        lease: Lease | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> Engine:
        """The engine there, or the engines as one; `model` and `version` are the servers' own, until the
        first update.

        Raises:
            ConfigError: no address file, or no token.
            MissingExtra: httpx is missing.
        """
        from rollwright.engine.remote.connect import connect

        return connect(self, clock, events, lease)
