"""Weights within one process: the live tensors themselves.

Role: the channel of mode `coupled`. Neighbours: trainer publishes, engine fetches, both in this process.
Invariants: versions only increase; only the newest can be had, because the trainer goes on writing into the
same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.errors import StoreError
from rollwright.types import PolicyVersion, Probe, WeightsRef


class InProcessChannel:
    """Holds the newest state, not a copy.

    Nothing travels, so the digest names the publication ("live:…") and hashes no bytes: whether an engine
    really computes with these weights is what the probe checks.
    """

    def __init__(self) -> None:
        self._ref: WeightsRef | None = None
        self._state: Mapping[str, Any] = {}

    def publish(
        self, version: PolicyVersion, state: Mapping[str, Any], probe: Probe | None = None
    ) -> WeightsRef:
        if self._ref is not None and version <= self._ref.version:
            raise StoreError(f"weights {version} published after {self._ref.version}: versions must increase")
        self._ref = WeightsRef(version=version, digest=f"live:{version.run}/{version}", probe=probe)
        self._state = state
        return self._ref

    def latest(self) -> WeightsRef | None:
        return self._ref

    def fetch(self, ref: WeightsRef) -> Mapping[str, Any]:
        if self._ref is None or ref.digest != self._ref.digest:
            newest = self._ref.version if self._ref else "none"
            raise StoreError(
                f"weights {ref.version} are gone: only the newest ({newest}) live in this process"
            )
        return self._state
