"""The public port: generate, score, complete text, watch.

Role: the routes that clients of a policy use. Neighbours: `app` serves them, `desk` does the work. Invariant:
nothing here changes the engine; that is what the control port is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import msgspec
import numpy as np

from rollwright.engine.serve.app import Answer, Events, Handler, Plain, one, read
from rollwright.engine.serve.bridge import Answers, Bridge
from rollwright.engine.serve.desk import named
from rollwright.engine.serve.job import Line
from rollwright.engine.serve.metrics import CONTENT_TYPE, text
from rollwright.engine.serve.wire import (
    AbortRequest,
    Choice,
    Done,
    Generated,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from rollwright.types import Ints


class Public:
    """Routes over `desk`; `model` is the name that metrics carry."""

    def __init__(self, desk: Bridge, model: str) -> None:
        self._desk, self._model = desk, model

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """By method and path."""
        return {
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/inference/v1/abort"): self._abort,
            ("POST", "/v1/score"): self._score,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
        }

    async def _generate(self, body: bytes) -> AsyncIterator[Answer]:
        request = read(GenerateRequest, body)
        prompt, params = ids(request.token_ids), request.sampling_params
        names, sampling = named(request.request_id, params.n), params.sampling()
        async with self._desk.job(
            [Line(name, prompt, sampling) for name in names],
            stream=request.stream and not request.whole,
            session=request.session,
            priority=request.priority,
            owner=request.owner,
        ) as job:
            name = request.request_id or names[0]
            if request.stream and not request.whole:
                yield Events(_pieces(job, name, len(prompt)))
            elif request.stream:
                yield Events(one(_together(job, name, len(prompt))))
            else:
                yield Plain(msgspec.json.encode(await _together(job, name, len(prompt))))

    async def _score(self, body: bytes) -> AsyncIterator[Answer]:
        request = read(ScoreRequest, body)
        found = await self._desk.score(ids(request.token_ids), request.temperature)
        yield Plain(msgspec.json.encode(Scores(logprobs=found.tolist())))

    async def _abort(self, body: bytes) -> AsyncIterator[Answer]:
        request = read(AbortRequest, body)
        await self._desk.abort(request.requests, request.owner)
        yield Plain(msgspec.json.encode(Done()))

    async def _health(self, body: bytes) -> AsyncIterator[Answer]:
        yield Plain(msgspec.json.encode(await self._desk.health()))

    async def _metrics(self, body: bytes) -> AsyncIterator[Answer]:
        yield Plain(text(await self._desk.health(), self._model).encode(), CONTENT_TYPE)


async def _together(job: Answers, name: str, prompt: int) -> Generated:
    choices: list[Choice] = []
    while choice := await job.next():
        choices.append(choice)
    choices.sort(key=lambda each: each.index)
    return Generated(request_id=name, choices=choices, prompt_tokens=prompt)


async def _pieces(job: Answers, name: str, prompt: int) -> AsyncIterator[bytes]:
    while choice := await job.next():
        yield msgspec.json.encode(Generated(request_id=name, choices=[choice], prompt_tokens=prompt))
        await asyncio.sleep(0)  # the engine's loop is this one: pieces that wait must not hold it up


def ids(tokens: tuple[int, ...]) -> Ints:
    """As an array.

    Raises:
        ValueError: none, or one that is no token id.
    """
    if any(not 0 <= each < 2**31 for each in tokens):
        raise ValueError("token_ids: ids are 0 … the size of the vocabulary")
    return np.array(tokens, np.int32)
