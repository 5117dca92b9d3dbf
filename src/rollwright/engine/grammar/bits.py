"""Token masks as bits and as booleans.

Role: what the sampler needs to apply masks; no torch. Neighbours: matchers fill the bits, the engine's
sampler turns a step's rows into booleans at once. Invariant: bit i % 32 of word i // 32 is token i, whatever
the machine's byte order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rollwright.engine.grammar.base import Bits

WORD = 32


def words(vocab: int) -> int:
    """Number of words that hold a bit for each of `vocab` tokens."""
    return (vocab + WORD - 1) // WORD


def empty(vocab: int, rows: int | None = None) -> Bits:
    """uint32[W], or uint32[rows, W]: masks that allow nothing."""
    return np.zeros(words(vocab) if rows is None else (rows, words(vocab)), np.uint32)


def allowed(bits: Bits, vocab: int) -> npt.NDArray[np.bool_]:
    """bool[…, vocab] of uint32[…, W]: True where a token may come. One pass of C code over all rows, about
    10 µs a row of 150,000 tokens."""
    octets = bits.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab, bitorder="little").view(np.bool_)


def of(tokens: Iterable[int], vocab: int) -> Bits:
    """uint32[W] with the bits of these tokens."""
    flags = np.zeros(words(vocab) * WORD, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def tokens(bits: Bits, vocab: int) -> list[int]:
    """The tokens that uint32[W] allows, ascending."""
    found: list[int] = np.flatnonzero(allowed(bits, vocab)).tolist()
    return found


def has(bits: Bits, token: int) -> bool:
    """Whether uint32[W] allows `token`."""
    return bool((int(bits[token // WORD]) >> (token % WORD)) & 1)
