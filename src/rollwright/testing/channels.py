"""What every weight channel must do.

Role: the conformance suite of `weights.base`. Neighbours: `tests/contract`. Invariant: a check gets from
`make()` a pair of ends over one empty channel: the trainer's, and an engine's (the same object where
nothing travels).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rollwright.errors import StoreError
from rollwright.types import PolicyVersion, Probe, WeightsRef
from rollwright.weights.base import WeightChannel

Make = Callable[[], tuple[WeightChannel, WeightChannel]]


def state(value: float) -> Mapping[str, Any]:
    """A few small tensors: two types, one empty, two sharing their memory."""
    import torch

    weight = torch.full((3, 2), value)
    return {
        "layers.0.weight": weight,
        "layers.0.scale": torch.full((4,), value, dtype=torch.bfloat16),
        "head.weight": weight,
        "nothing": torch.zeros(0),
    }


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states hold the same names, types and numbers."""
    import torch

    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def refused(action: Callable[[], object]) -> bool:
    """Whether `action` raises `StoreError`."""
    try:
        action()
    except StoreError:
        return True
    return False


def check_empty(make: Make) -> None:
    """Before the first publication there is nothing."""
    trainer, engine = make()
    assert trainer.latest() is None and engine.latest() is None


def check_publish_and_fetch(make: Make) -> None:
    """What is published arrives whole: version, digest, probe, every number."""
    trainer, engine = make()
    probe = Probe(
        tokens=np.array([1, 2, 3], dtype=np.int32), logprobs=np.array([-0.1, -1e-8], dtype=np.float32)
    )
    version = PolicyVersion(run="run", step=1)
    published = trainer.publish(version, state(0.5), probe)
    found = engine.latest()
    assert found is not None and (found.version, found.digest) == (version, published.digest)
    assert found.probe is not None and found.probe.tokens.tolist() == [1, 2, 3]
    assert found.probe.tokens.dtype == np.int32 and found.probe.logprobs.dtype == np.float32
    assert found.probe.logprobs.tobytes() == probe.logprobs.tobytes()
    assert same(engine.fetch(found), state(0.5))


def check_newest_wins(make: Make) -> None:
    """The engine sees each new version; one without a probe has none."""
    trainer, engine = make()
    for step in range(6):
        trainer.publish(PolicyVersion(run="run", step=step), state(float(step)))
        found = engine.latest()
        assert found is not None and found.version.step == step and found.probe is None
        assert same(engine.fetch(found), state(float(step)))
    trainer.publish(PolicyVersion(run="run", incarnation=1, step=2), state(2.0))  # a resume: the same numbers
    found = engine.latest()
    assert found is not None and found.version.incarnation == 1 and same(engine.fetch(found), state(2.0))


def check_versions_increase(make: Make) -> None:
    """The same version again, an older step and an older incarnation are refused and change nothing."""
    trainer, engine = make()
    newest = PolicyVersion(run="run", incarnation=1, step=5)
    trainer.publish(newest, state(1.0))
    for version in (
        newest,
        PolicyVersion(run="run", incarnation=1, step=4),
        PolicyVersion(run="run", step=9),
    ):
        assert refused(lambda version=version: trainer.publish(version, state(2.0)))  # type: ignore[misc]
    found = engine.latest()
    assert found is not None and found.version == newest and same(engine.fetch(found), state(1.0))


def check_gone(make: Make) -> None:
    """Weights that were never published, or are long gone, cannot be fetched."""
    trainer, engine = make()
    first = trainer.publish(PolicyVersion(run="run"), state(-1.0))
    assert refused(lambda: engine.fetch(WeightsRef(version=first.version, digest="0" * 64)))
    for step in range(1, 40):
        trainer.publish(PolicyVersion(run="run", step=step), state(float(step)))
    assert refused(lambda: engine.fetch(first))


CHECKS: tuple[Callable[[Make], None], ...] = (
    check_empty,
    check_publish_and_fetch,
    check_newest_wins,
    check_versions_increase,
    check_gone,
)
