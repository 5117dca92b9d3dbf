"""A model's shape as the planner needs it: what each layer keeps of a token, and how many weights there are.

Role: frozen facts. Neighbours: `read` makes them from a config.json, `cards` has some built in, `cost` turns
them into bytes. Invariant: a layer either keeps vectors of each token it still sees, or a state of constant
size, or nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a layer keeps while a sequence runs."""

    FULL = "full attention"
    """Keys and values of every token."""
    WINDOW = "sliding window"
    """Those of the last `span` tokens."""
    CHUNK = "chunked attention"
    """Those since the last border of a chunk of `span` tokens."""
    STATE = "recurrent state"
    """A state of constant size: linear attention, Mamba."""
    SHARED = "another layer's"
    """Nothing of its own: it reads what an earlier layer keeps."""
    NONE = "nothing"
    """No token mixing: an MLP."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps."""

    kind: Kind
    heads: int = 0
    """KV heads; 1 for a latent."""
    key: int = 0
    """Numbers in a head's key; of a latent (MLA) its rank."""
    value: int = 0
    """Numbers in a head's value; of a latent those of the key that carries positions."""
    latent: bool = False
    """One compressed vector for all heads (arXiv 2405.04434), so no head of it can lie on another device."""
    span: int = 0
    """Tokens of a window or chunk."""
    state: int = 0
    """Numbers of the recurrent state, kept in float32."""
    convolution: int = 0
    """Numbers of the convolution's state, kept in the model's dtype."""


@dataclass(frozen=True)
class Parameters:
    """How many weights a model has."""

    dense: int
    """Used by every token."""
    experts: int = 0
    """In all experts together."""
    share: float = 1.0
    """Share of the experts that one token goes through."""

    @property
    def total(self) -> int:
        """All weights."""
        return self.dense + self.experts

    @property
    def active(self) -> float:
        """Weights that one token is multiplied with."""
        return self.dense + self.experts * self.share

    def read(self, batch: int) -> float:
        """Weights that a decode step of `batch` sequences reads: an expert is read where any of them goes
        through it, routes being taken as independent."""
        return self.dense + self.experts * (1.0 - (1.0 - self.share) ** batch)


@dataclass(frozen=True)
class Card:
    """A model, as far as its memory goes."""

    name: str
    layers: tuple[Layer, ...]
    context: int
    """Longest sequence that the model was made for; 0: the configuration does not say."""
    parameters: Parameters
    dtype: str
    """Of the weights: `bf16`, `fp16`, `fp32`."""
    quantised: bool = False
    """The checkpoint's weights are smaller than `dtype` says."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures should know."""
