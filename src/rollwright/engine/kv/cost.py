"""Bytes of keys and values: of a token, of a sequence, of many sequences with what they share.

Role: the arithmetic. Neighbours: `card` says what layers keep, `plan` asks. Invariants: every figure is of
one device of `tensor_parallel`; blocks are rounded up where they are owned and down where they are shared;
what a layer can't see any more is not held.

A token in a layer with multi-head or grouped attention costs 2 × KV heads × head size × bytes per number; a
latent (MLA, arXiv 2405.04434) its rank and the rotary key, once for keys and values of all heads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rollwright.engine.kv.card import Card, Kind, Layer
from rollwright.engine.kv.traffic import Traffic
from rollwright.errors import ConfigError

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Bits of one number."""
SCALES = {"int8": 2, "int4": 4}
"""Bytes that a group of quantised numbers has beside it: a 16-bit scale, with int4 a zero point too. fp8 has
one scale a tensor, which costs nothing a token."""
STATE_BYTES = 4
"""Of a number in a recurrent state, which is kept in float32."""


@dataclass(frozen=True)
class Format:
    """How numbers of keys and values are stored."""

    dtype: str = "bf16"
    group: int = 0
    """Numbers that share a scale; 0 is a whole head's vector."""

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ConfigError(f"dtype '{self.dtype}' is not known; take one of {', '.join(BITS)}")
        if self.group < 0:
            raise ConfigError(f"a group of {self.group} numbers: expected at least 1, or 0 for a whole head")

    def vector(self, size: int) -> int:
        """Bytes of `size` numbers side by side, with their scales."""
        if not size:
            return 0
        return -(-size * BITS[self.dtype] // 8) + -(-size // (self.group or size)) * SCALES.get(self.dtype, 0)


@dataclass(frozen=True)
class Line:
    """What the layers of one kind cost together."""

    kind: Kind
    layers: int
    span: int
    """Tokens they see at most; 0 is all."""
    token_bytes: int
    """For each token held."""
    state_bytes: int
    """For each sequence, whatever its length."""


@dataclass(frozen=True)
class Cost:
    """The costs of a model on one device."""

    card: Card
    format: Format = Format()
    block: int = 1
    """Tokens of a page: memory is taken in whole ones."""
    tensor_parallel: int = 1
    """Devices that share the heads; where there are fewer KV heads than devices, heads are held twice."""

    def __post_init__(self) -> None:
        for name in ("block", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected at least 1")

    def lines(self) -> list[Line]:
        """The layers by kind, in their order; those that keep nothing cost nothing."""
        counted = Counter(self.card.layers)
        found: dict[tuple[Kind, int], Line] = {}
        for layer, number in counted.items():
            at = (layer.kind, layer.span)
            token, state = number * self._token(layer), number * self._state(layer)
            before = found.get(at, Line(*at[:1], 0, layer.span, 0, 0))
            found[at] = Line(
                layer.kind,
                before.layers + number,
                layer.span,
                before.token_bytes + token,
                before.state_bytes + state,
            )
        return list(found.values())

    def token_bytes(self) -> int:
        """Of one token more while every layer still sees all: 2 × layers × KV heads × head size × bytes."""
        return sum(line.token_bytes for line in self.lines())

    def sequence_bytes(self, tokens: int) -> int:
        """Of one sequence of `tokens` tokens."""
        return sum(line.token_bytes * self.held(line, tokens) + line.state_bytes for line in self.lines())

    def held(self, line: Line, tokens: int) -> int:
        """Tokens that a layer holds of a sequence of `tokens`, in whole blocks. A window begins anywhere in a
        block, a chunk at a border."""
        block, whole = self.block, _up(tokens, self.block)
        if not line.span or tokens <= line.span:
            return whole
        if line.kind is Kind.CHUNK:
            return min(whole, _up(line.span, block))
        return min(whole, _up(line.span - 1, block) + block)

    def together(self, traffic: Traffic, sequences: int, tokens: int) -> int:
        """Bytes of `sequences` at their end, each of `tokens` tokens, with what `traffic` says they share
        held once: whole blocks of the common beginning, and of a group's prompt.

        Recurrent layers share nothing; that a prefix can be found again costs a state for each group.
        """
        groups = -(-sequences // traffic.group)
        common = _down(min(traffic.shared, tokens), self.block)
        prompt = max(common, _down(min(traffic.prompt, tokens), self.block)) if traffic.group > 1 else common
        total = 0
        for line in self.lines():
            if line.kind is Kind.STATE:
                total += line.state_bytes * (sequences + (groups if traffic.group > 1 else 0))
                continue
            alone = sequences * self.held(line, tokens)
            if line.span and tokens > line.span:
                shared = groups * self.held(line, prompt) + sequences * self.held(line, tokens - prompt)
            else:
                shared = common + groups * (prompt - common) + sequences * _up(tokens - prompt, self.block)
            total += line.token_bytes * min(alone, shared)
        return total

    def hit_rate(self, traffic: Traffic) -> float:
        """Share of all prompt tokens that a cache which forgets nothing finds, in whole blocks; 0 to 1."""
        asked = found = 0
        for turn in range(traffic.turns):
            length = traffic.prompt + turn * (traffic.sampled + traffic.observed)
            asked += traffic.group * length
            if turn:  # all but the last sampled token, whose keys were not computed yet
                found += traffic.group * _down(length - traffic.observed - 1, self.block)
            else:
                again = max(0, _down(traffic.prompt - 1, self.block))
                found += min(again, _down(traffic.shared, self.block)) + (traffic.group - 1) * again
        return found / asked if asked else 0.0

    def _token(self, layer: Layer) -> int:
        heads = layer.heads if layer.latent else -(-layer.heads // self.tensor_parallel)
        return heads * (self.format.vector(layer.key) + self.format.vector(layer.value))

    def _state(self, layer: Layer) -> int:
        kept = STATE_BYTES * layer.state + BITS[self.card.dtype] // 8 * layer.convolution
        return -(-kept // self.tensor_parallel)


def _up(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _down(tokens: int, block: int) -> int:
    return tokens // block * block
