"""The health of several engines as one.

Role: sums and extremes. Neighbours: `replicas`. Invariant: a ratio without data stays None.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollwright.engine.base import Health


def together(every: Sequence[Health], serving: Sequence[Health]) -> Health:
    """Counters of `every` summed; ready if one of `serving` is. Rates add up, variation and gap are those of
    the worst that serves, the version the oldest of those."""
    versions = [each.version for each in serving or every]
    rates = [each.rate for each in serving if each.rate is not None]
    variations = [each.rate_variation for each in serving if each.rate_variation is not None]
    gaps = [each.gap_p99 for each in serving if each.gap_p99 is not None]
    return Health(
        ready=any(each.ready for each in serving),
        version=min(versions, key=lambda version: (version.incarnation, version.step)),
        running=sum(each.running for each in every),
        waiting=sum(each.waiting for each in every),
        prompt_tokens=sum(each.prompt_tokens for each in every),
        cached_tokens=sum(each.cached_tokens for each in every),
        sampled_tokens=sum(each.sampled_tokens for each in every),
        steps=sum(each.steps for each in every),
        busy_seconds=sum(each.busy_seconds for each in every),
        idle_seconds=sum(each.idle_seconds for each in every),
        kv_tokens=sum(each.kv_tokens for each in every),
        kv_capacity=sum(each.kv_capacity for each in every),
        kv_bytes=sum(each.kv_bytes for each in every),
        host_tokens=sum(each.host_tokens for each in every),
        retracted=sum(each.retracted for each in every),
        constrained=sum(each.constrained for each in every),
        compliant=sum(each.compliant for each in every),
        rate=sum(rates) if rates else None,
        rate_variation=max(variations) if variations else None,
        gap_p99=max(gaps) if gaps else None,
    )
