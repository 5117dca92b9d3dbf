"""One request of a client while the engine works on it: one or several completions.

Role: between the engine and whoever writes the answer. Neighbours: `desk` opens jobs, aborts and counts
them. Invariants: a job is begun only when the engine has taken every line of it; closing it, however it
stands, leaves nothing of it in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from rollwright.engine.base import Engine
from rollwright.engine.serve.wire import Choice, piece, whole
from rollwright.types import Ints, Sampling

Put = Callable[[Choice | Exception], None]
"""Takes what the engine gave: choices or pieces of them, or the error that ended a line."""


@dataclass(frozen=True)
class Line:
    """One completion that is asked for."""

    name: str
    prompt: Ints
    sampling: Sampling


class Job:
    """`lines` under way in `engine`; the i-th line's choices have index i."""

    def __init__(
        self,
        engine: Engine,
        lines: Sequence[Line],
        put: Put,
        *,
        stream: bool,
        session: str,
        priority: int,
        owner: str,
    ) -> None:
        self._engine, self._lines, self._put, self.owner = engine, lines, put, owner
        self._stream, self._session, self._priority = stream, session, priority
        self._tasks: list[asyncio.Task[None]] = []
        self._refused: Exception | None = None
        self._begun = False

    @property
    def names(self) -> tuple[str, ...]:
        """What its requests are called in the engine."""
        return tuple(line.name for line in self._lines)

    @property
    def running(self) -> tuple[str, ...]:
        """Those that the engine has not ended."""
        pairs = zip(self._lines, self._tasks, strict=False)
        return tuple(line.name for line, task in pairs if not task.done())

    @property
    def prompt_tokens(self) -> int:
        """Of all lines."""
        return sum(len(line.prompt) for line in self._lines)

    async def begin(self) -> None:
        """Hand everything to the engine.

        Raises:
            Exception: what the engine refuses one of them with; the others are taken back.
        """
        self._tasks = [asyncio.create_task(self._run(i, line)) for i, line in enumerate(self._lines)]
        await asyncio.sleep(0)  # in its first turn a task hands its line to the engine
        self._begun = True
        if self._refused is not None:
            await self.close()
            raise self._refused

    async def close(self) -> None:
        """End what still runs. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ended(self) -> None:
        """Return when the engine has ended every line."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, index: int, line: Line) -> None:
        try:
            await (self._pieces(index, line) if self._stream else self._whole(index, line))
        except Exception as error:  # boundary: whatever ends a line is its reader's to hear
            if not self._begun:
                self._refused = self._refused or error
            self._put(error)

    async def _whole(self, index: int, line: Line) -> None:
        done = await self._engine.generate(
            line.prompt,
            line.sampling,
            request=line.name,
            session=self._session,
            priority=self._priority,
        )
        self._put(whole(done, index))

    async def _pieces(self, index: int, line: Line) -> None:
        stream = self._engine.stream(
            line.prompt,
            line.sampling,
            request=line.name,
            session=self._session,
            priority=self._priority,
        )
        last = None
        async with aclosing(cast(Any, stream)) as chunks:
            async for chunk in chunks:
                if chunk.finish is None:
                    self._put(piece(chunk, index))
                else:
                    last = piece(chunk, index)
        if last is None:
            raise RuntimeError(f"the engine ended the stream {line.name!r} without a finish")
        self._put(last)  # only now is the name free again
