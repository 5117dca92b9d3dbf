"""The weight channel seam.

Role: publishes versions, hands out the newest. Neighbours: trainer side publishes, rollout side polls and
updates its engine. Invariants: a version is visible only when its bytes are durable and its digest checks;
a probe travels with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rollwright.types import PolicyVersion, Probe, WeightsRef


class WeightChannel(Protocol):
    """Publish and fetch weights."""

    def publish(
        self, version: PolicyVersion, state: Mapping[str, Any], probe: Probe | None = None
    ) -> WeightsRef:
        """Make `state` (name → tensor) the newest version; it must be newer than the last one."""

    def latest(self) -> WeightsRef | None:
        """The newest published version; cheap, meant for polling."""

    def fetch(self, ref: WeightsRef) -> Mapping[str, Any]:
        """The state of `ref`. Raises `StoreError` where the digest does not match or it is gone."""
