"""Counters of an engine as Prometheus text.

Role: what `/metrics` answers. Neighbours: the server, and whoever else wants to show a `Health`; nothing here
needs a server. Invariant: a ratio without data is absent, never 0.

Format: Prometheus text exposition 0.0.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollwright.engine.base import Health

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class _Family:
    """One metric: its name without the prefix, its type, what it says, and its value."""

    name: str
    kind: str
    help: str
    value: float | None


def text(health: Health, engine: str = "embedded") -> str:
    """All of `health`, each with the label `engine`."""
    label = engine.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines: list[str] = []
    for each in (*_rates(health), *_counters(health), *_gauges(health)):
        if each.value is None:
            continue
        name = f"rollwright_engine_{each.name}"
        lines += [f"# HELP {name} {each.help}", f"# TYPE {name} {each.kind}"]
        lines.append(f'{name}{{engine="{label}"}} {float(each.value)!r}')
    return "\n".join(lines) + "\n"


def _rates(health: Health) -> tuple[_Family, ...]:
    """The three metrics that decide, and what belongs to them."""
    return (
        _Family(
            "prefix_hit_ratio", "gauge", "Prompt tokens found in the prefix cache, of all.", health.hit_rate
        ),
        _Family(
            "decode_rate_variation",
            "gauge",
            "Coefficient of variation of tokens per second over windows.",
            health.rate_variation,
        ),
        _Family(
            "token_gap_p99_seconds",
            "gauge",
            "Time between two tokens of one request, 99th percentile.",
            health.gap_p99,
        ),
        _Family(
            "compliance_ratio",
            "gauge",
            "Constrained completions that are whole words of their language, of all.",
            health.compliance,
        ),
        _Family("decode_tokens_per_second", "gauge", "Over the last windows.", health.rate),
    )


def _counters(health: Health) -> tuple[_Family, ...]:
    return (
        _Family("prompt_tokens_total", "counter", "Prompt tokens taken.", health.prompt_tokens),
        _Family("cached_tokens_total", "counter", "Of those, found in the cache.", health.cached_tokens),
        _Family("sampled_tokens_total", "counter", "Tokens sampled.", health.sampled_tokens),
        _Family("steps_total", "counter", "Steps of the scheduler.", health.steps),
        _Family("busy_seconds_total", "counter", "Time spent computing.", health.busy_seconds),
        _Family("idle_seconds_total", "counter", "Time without work.", health.idle_seconds),
        _Family("retracted_total", "counter", "Requests put back for want of KV.", health.retracted),
        _Family("constrained_total", "counter", "Completions under a constraint.", health.constrained),
        _Family("compliant_total", "counter", "Of those, whole words of it.", health.compliant),
    )


def _gauges(health: Health) -> tuple[_Family, ...]:
    return (
        _Family("ready", "gauge", "1 while it serves.", float(health.ready)),
        _Family("running", "gauge", "Requests being computed.", health.running),
        _Family("waiting", "gauge", "Requests that wait.", health.waiting),
        _Family("kv_tokens", "gauge", "Tokens whose KV is held.", health.kv_tokens),
        _Family("kv_capacity_tokens", "gauge", "Tokens whose KV fits.", health.kv_capacity),
        _Family("kv_bytes", "gauge", "Bytes allocated for KV.", health.kv_bytes),
        _Family("host_tokens", "gauge", "Tokens whose KV is in the host tier.", health.host_tokens),
        _Family("policy_step", "gauge", "Step of the policy version served.", health.version.step),
        _Family("policy_incarnation", "gauge", "Its incarnation.", health.version.incarnation),
    )
