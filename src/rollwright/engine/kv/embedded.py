"""Bytes that the embedded engine takes for keys and values, known before it starts.

Role: its rounding, in one place: the engine allocates with these constants, `preflight` and the report
predict with them. Neighbours: `engine/embedded` imports the constants, `run` asks before a run. Invariant:
float32; rows and positions grow in whole steps of `ROWS` and `POSITIONS`, and what the prefix cache holds
costs a token's bytes each.

A running request has a row for the end of its history (its tail); what lies before it is in the prefix cache.
So KV = ⌈requests / ROWS⌉·ROWS × ⌈longest tail / POSITIONS⌉·POSITIONS × bytes of a token + cached tokens ×
bytes of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.kv.traffic import Traffic

FLOAT_BYTES = 4
ROWS = 8
"""Rows are allocated in multiples of this."""
POSITIONS = 64
"""Positions of a row are allocated in multiples of this."""


@dataclass(frozen=True)
class Pool:
    """What the engine holds at once."""

    token_bytes: int
    """Of one token: 4 × 2 × layers × KV heads × head size (`Shape.kv_values`)."""
    rows: int
    """Rows allocated."""
    positions: int
    """Tokens that a row has room for."""
    cached: int
    """Tokens in the prefix cache."""
    host: int = 0
    """Tokens in the host tier, which lies in main memory."""

    @property
    def row_bytes(self) -> int:
        """Of the running requests' rows."""
        return self.rows * self.positions * self.token_bytes

    @property
    def cache_bytes(self) -> int:
        """Of the prefix cache."""
        return self.cached * self.token_bytes

    @property
    def host_bytes(self) -> int:
        """Of the host tier."""
        return self.host * self.token_bytes

    @property
    def bytes(self) -> int:
        """What `Health.kv_bytes` says: rows and prefix cache."""
        return self.row_bytes + self.cache_bytes


def pool(config: EmbeddedConfig, values: int, *, requests: int, tail: int, cached: int | None = None) -> Pool:
    """What the engine allocates for at most `requests` at once with tails of at most `tail` tokens, once the
    prefix cache holds `cached` tokens (None: all that it may). `values`: numbers in one token's KV
    (`Shape.kv_values`).
    """
    rows, positions = min(requests, config.max_batch), min(tail, config.row_tokens)
    return Pool(
        token_bytes=FLOAT_BYTES * values,
        rows=_up(rows, ROWS),
        positions=_up(positions, POSITIONS),
        cached=config.kv_tokens if cached is None else min(cached, config.kv_tokens),
        host=config.host_tokens,
    )


def expected(config: EmbeddedConfig, values: int, traffic: Traffic, *, groups: int, requests: int) -> Pool:
    """The most that the engine comes to hold while `groups` groups of `traffic` run, at most `requests` at
    once: rows for the longest tail, and in the cache every token but the last of each rollout, what is common
    counted once, or as many as it may hold.

    Exact once the cache is full. Before, up to a tail for each running request less is held, for what lies in
    a row is not in the cache. A rollout whose history was evicted between two turns has a longer tail.
    """
    own = traffic.length - traffic.prompt - 1
    cached = traffic.shared + groups * (traffic.prompt - traffic.shared) + groups * traffic.group * own
    return pool(
        config,
        values,
        requests=min(requests, groups * traffic.group),
        tail=longest_tail(config, traffic),
        cached=cached,
    )


def admissible(config: EmbeddedConfig, tokens: int) -> int:
    """How many rollouts may be under way at once, those that wait for a tool too, so that the KV of all their
    histories of up to `tokens` has a place and none is computed again because another pushed it out; at
    least 1.

    Who runs, at most `max_batch`, has the end of its history in a row; everything else lies in the prefix
    cache. What rollouts share is not counted: it makes room for more than this.
    """
    row = min(config.row_tokens, tokens)
    many = (config.kv_tokens + config.max_batch * row) // tokens
    if many < config.max_batch:  # then all of them run
        many = (
            config.max_batch if row == tokens else min(config.max_batch, config.kv_tokens // (tokens - row))
        )
    return max(1, many)


def longest_tail(config: EmbeddedConfig, traffic: Traffic) -> int:
    """Tokens of the longest tail, at most `row_tokens`. The first turn computes the whole prompt in its row.
    A later one takes what only it goes on from back into its row, up to half of it, and leaves in the cache
    what others read: a group's prompt, the beginning common to all."""
    longest = traffic.prompt + traffic.sampled - 1
    left = traffic.prompt - 1 if traffic.group > 1 else traffic.shared
    for turn in range(1, traffic.turns):
        before = traffic.prompt + turn * traffic.sampled + (turn - 1) * traffic.observed - 1
        back = before - left if before - left <= config.row_tokens // 2 else 0
        longest = max(longest, back + traffic.observed + traffic.sampled)
    return min(longest, config.row_tokens)


def fitting(
    config: EmbeddedConfig, values: int, budget: int, *, requests: int, tail: int
) -> Iterator[tuple[str, int]]:
    """(key, value) for each key of `[engine]` that brings the pool within `budget` bytes when it alone is
    lowered, the largest such value; none where no single key does."""
    for key in ("kv_tokens", "max_batch", "row_tokens", "host_tokens"):
        least = {"row_tokens": 16, "host_tokens": 0}.get(key, 1)
        most = getattr(config, key)

        def fits(value: int, key: str = key) -> bool:
            changed = config.model_copy(update={key: value})
            found = pool(changed, values, requests=requests, tail=tail)
            return found.bytes + found.host_bytes <= budget

        if most <= least or not fits(least):
            continue
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        yield key, least


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
