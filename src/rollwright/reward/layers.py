"""From checks to parts to one value.

Role: which layer a check belongs to, and what the layers are worth together. Neighbours: `rules` makes the
parts. Invariants: the value is between 0 and 1; in every mode it is 0 where a meaning check fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollwright.errors import SchemaError
from rollwright.reward.config import RewardConfig
from rollwright.types import (
    AnswerEquals,
    AnswerJson,
    CallsSucceed,
    Check,
    FileHolds,
    Part,
    ReturnValue,
    ScoredBy,
    SqlResult,
    StdoutEquals,
    TwinReplay,
    ValuesSeen,
    VariableExists,
)

Layer = Literal["status", "meaning", "intermediate"]

LAYERS: dict[type[Check], Layer] = {
    CallsSucceed: "status",
    AnswerEquals: "meaning",
    AnswerJson: "meaning",
    StdoutEquals: "meaning",
    FileHolds: "meaning",
    ReturnValue: "meaning",
    SqlResult: "meaning",
    ScoredBy: "meaning",
    TwinReplay: "meaning",
    ValuesSeen: "intermediate",
    VariableExists: "intermediate",
}
"""Kind of check → its layer."""


def layer(check: Check) -> Layer:
    """The layer of `check`.

    Raises:
        SchemaError: a kind of check that has none.
    """
    if type(check) not in LAYERS:
        raise SchemaError(f"no layer for checks of type {type(check).__name__}; known: {_known()}")
    return LAYERS[type(check)]


def _known() -> str:
    return ", ".join(kind.__name__ for kind in LAYERS)


def part(check: Check, value: float, detail: str = "") -> Part:
    """The verdict on `check`; its name is the check's kind."""
    return Part(name=str(check.__struct_config__.tag), layer=layer(check), value=value, detail=detail)


def passed(parts: Sequence[Part]) -> bool:
    """Whether each of them is worth 1."""
    return all(part.value >= 1.0 for part in parts)


def value(checks: Sequence[Check], parts: Sequence[Part], config: RewardConfig) -> float:
    """What the parts (one for each check, in order) are worth together: 0 to 1.

    A layer is the mean of its parts, weighted by the checks' weights; layers without checks do not count.
    """
    if config.mode == "strict" or passed(parts):  # exactly 1, whatever the weights add up to
        return float(passed(parts))
    if not passed([part for part in parts if part.layer == "meaning"]):
        return 0.0
    weights = {"status": config.status, "meaning": config.meaning, "intermediate": config.intermediate}
    total = mean = 0.0
    for name, weight in weights.items():
        held = [
            (check.weight, part.value)
            for check, part in zip(checks, parts, strict=True)
            if part.layer == name
        ]
        mass = sum(each for each, _ in held)
        if mass > 0:
            total += weight
            mean += weight * sum(each * worth for each, worth in held) / mass
    return min(1.0, mean / total) if total > 0 else 0.0
