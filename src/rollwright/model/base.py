"""The seam between a policy's network and what runs it: a forward over tokens whose attention is handed in.

Role: what engine, scoring and trainer know of a model. Neighbours: `decoder` (lean, ours) and `hf` (any
Hugging Face decoder) implement it. Invariant: token i's output depends only on tokens that `attend` lets it
see; the attention gets queries and keys as they are to be multiplied, positions in them already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter

    Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
    """(layer, q[N, H, D], k[N, Hkv, D], v[N, Hkv, D]) → what each token gathers, [N, H, D]."""


@dataclass(frozen=True)
class Shape:
    """What KV and attention of a decoder look like; the same for every layer but `windows`."""

    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    context: int
    """Longest row in tokens."""
    scale: float
    """What scores are multiplied with before the softmax, mostly 1/√head_dim."""
    windows: tuple[int | None, ...]
    """For each layer how many tokens one sees, itself included; None is all before it."""

    @property
    def kv_values(self) -> int:
        """Numbers in one token's KV, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


class Model(Protocol):
    """A decoder over a flat list of N tokens: rows back to back, no padding."""

    @property
    def shape(self) -> Shape:
        """Its shape."""

    @property
    def vocab(self) -> int:
        """Number of ids."""

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | None = None) -> Tensor:
        """int64[N] ids at int64[N] positions → float[N, dim]; with `keep` int64[K] only those K rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float[N, dim] → float[N, vocab]."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Name and tensor of each weight, tied ones once."""


@dataclass(frozen=True)
class Vocabulary:
    """What the ids of a tokenizer spell, for those who must look inside tokens: grammars, stop strings."""

    pieces: tuple[bytes, ...]
    """Bytes of each id, in order; of a control token its name's."""
    control: Mapping[str, int]
    """Control tokens, which no text encodes to, by name."""
