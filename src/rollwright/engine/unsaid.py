"""A stream that goes on at another replica, which begins again.

Role: leaves out what its reader has. Neighbours: `replicas`. Invariant: what comes out goes on exactly where
it stopped, or ends with an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec.structs import replace

from rollwright.errors import EngineError
from rollwright.types import Chunk


async def unsaid(chunks: AsyncIterator[Chunk], said: list[int]) -> AsyncIterator[Chunk]:
    """`chunks` without the tokens that are out already.

    Raises:
        EngineError: they begin otherwise.
    """
    async for chunk in chunks:
        known = min(len(said), len(chunk.tokens))
        if said[:known] != chunk.tokens[:known].tolist():
            raise Contradicts("a replica died under a stream, and the next one does not repeat its tokens")
        del said[:known]
        if known == 0 or chunk.finish is not None or known < len(chunk.tokens):
            yield replace(chunk, tokens=chunk.tokens[known:], logprobs=chunk.logprobs[known:])


class Contradicts(EngineError, ValueError):
    """Not the replica's fault, and no other would do better."""
