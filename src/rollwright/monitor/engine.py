"""The live figures of an engine: prefix hits, decode stability, compliance.

Role: makes metrics of two `Health` records, and words of metrics. Neighbours: the rollout side emits them,
`terminal` and the report show them. Invariant: what has no data is left out of the metrics and said to have
none, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollwright.engine.base import Health

HIT_RATE = "engine/hit_rate"
"""Cached share of the prompt tokens of an interval."""
DECODE_RATE = "engine/decode_rate"
"""Tokens per second that the engine computed, over its last windows."""
DECODE_VARIATION = "engine/decode_variation"
"""Coefficient of variation of tokens per second over these windows."""
GAP_P99 = "engine/gap_p99_ms"
"""Milliseconds between two tokens of a request, 99th percentile."""
COMPLIANCE = "engine/compliance"
"""Share of the completions under a constraint, ended in an interval, that are whole words of its language."""

NO_DATA = "no data"


def told(health: Health, before: Health) -> dict[str, float]:
    """The metrics of an engine between two looks at it; those without data are absent."""
    prompt = health.prompt_tokens - before.prompt_tokens
    constrained = health.constrained - before.constrained
    gap = health.gap_p99
    found = {
        "engine/running": float(health.running),
        "engine/kv_share": health.kv_tokens / health.kv_capacity if health.kv_capacity else None,
        HIT_RATE: (health.cached_tokens - before.cached_tokens) / prompt if prompt > 0 else None,
        DECODE_RATE: health.rate,
        DECODE_VARIATION: health.rate_variation,
        GAP_P99: None if gap is None else 1000 * gap,
        COMPLIANCE: (health.compliant - before.compliant) / constrained if constrained > 0 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def described(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, text) of hits, decode, gap and compliance, from the newest metrics of a run."""
    rate, variation = metrics.get(DECODE_RATE), metrics.get(DECODE_VARIATION)
    decode = NO_DATA if rate is None else f"{rate:,.0f} tok/s"
    if variation is not None:
        decode += f" ± {100 * variation:.0f} %"
    gap = metrics.get(GAP_P99)
    return [
        ("hits", _percent(metrics.get(HIT_RATE))),
        ("decode", decode),
        ("p99 gap", NO_DATA if gap is None else f"{gap:.3g} ms" if gap < 1000 else f"{gap / 1000:.3g} s"),
        ("compliance", _percent(metrics.get(COMPLIANCE))),
    ]


def _percent(value: float | None) -> str:
    return NO_DATA if value is None else f"{100 * value:.0f} %"
