"""Settings of the inference engines; no torch.

Role: the `[engine]` table. Neighbours: the conductor builds the engine from it. Invariant: building is what
imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollwright.clock import Clock
from rollwright.engine.base import Engine
from rollwright.events import Sink
from rollwright.plugins import PartConfig
from rollwright.pool.base import Lease
from rollwright.types import PolicyVersion


class EmbeddedConfig(PartConfig):
    """The engine inside this process: torch, continuous batching, radix KV cache."""

    type: Literal["embedded"] = "embedded"
    """Name of the implementation."""
    max_batch: int = Field(64, ge=1)
    """Requests decoded together; more of them wait. Each has a row of KV as long as the longest needs."""
    kv_tokens: int = Field(32768, ge=1)
    """Tokens the prefix cache holds; the least recently used are evicted beyond that."""
    prefill_tokens: int = Field(512, ge=1)
    """Prompt tokens computed in one step beside the decoding requests; longer prompts take several steps."""

    def build(
        self, decoder: Any, version: PolicyVersion, clock: Clock, events: Sink, lease: Lease | None = None
    ) -> Engine:
        """An engine over `decoder` (a `model.decoder.Decoder`), whose weights are `version`."""
        from rollwright.engine.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(decoder, self, version, clock, events, lease)
