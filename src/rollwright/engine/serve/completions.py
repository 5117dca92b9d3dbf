"""Text in, text out: a subset of OpenAI's `/v1/completions`.

Role: for people and programs that have no tokenizer at hand. What is trained comes from the token endpoint:
text that was decoded cannot be turned back into the tokens that were sampled. Neighbours: `app` serves it,
`text.TextStream` cuts the text. Invariants: a stream holds no broken character and no part of a stop string;
a field that isn't known is refused. Not covered: `suffix`, `echo`, `best_of`, penalties, alternatives.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from rollwright.clock import Clock
from rollwright.engine.serve.app import Answer, Events, Handler, Plain, Refused, read
from rollwright.engine.serve.bridge import Answers, Bridge
from rollwright.engine.serve.job import Line
from rollwright.engine.serve.public import ids
from rollwright.engine.serve.wire import MOST, Choice, Finite, Number, SamplingParams, Wire
from rollwright.engine.text import TextStream, spelt
from rollwright.model.base import Vocabulary
from rollwright.types import Finish


@dataclass(frozen=True)
class TextModel:
    """What text needs beside the engine: a name, the bytes of the ids, the ids of a text, and those that end
    a completion of themselves."""

    name: str
    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]
    end: tuple[int, ...] = ()


class StreamOptions(Wire, frozen=True, kw_only=True):
    """What a stream says beside the text."""

    include_usage: bool = False


class CompletionRequest(Wire, frozen=True, kw_only=True):
    """See OpenAI's reference; what isn't here is refused."""

    prompt: str | list[str | int | list[int]]
    model: str = ""
    max_tokens: Number = 16
    temperature: Finite = 1.0
    top_p: Finite = 1.0
    top_k: Number = 0
    min_p: Finite = 0.0
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    ignore_eos: bool = False
    priority: Number = 0
    user: str = ""
    request_id: str = ""
    """Together with `seed` it keys the noise: both equal, the same text again."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """OpenAI's form; no alternatives."""

    tokens: list[str]
    token_logprobs: list[float]


class TextChoice(Struct, frozen=True, kw_only=True):
    """One completion, or a piece of it."""

    index: int
    text: str
    finish_reason: Finish | None
    logprobs: TokenLogprobs | None = None
    token_ids: list[int] | None = None


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens taken and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextCompletion(Struct, frozen=True, kw_only=True):
    """The answer, and each event of a stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: Usage | None = None


class Completions:
    """The text routes over `desk`."""

    def __init__(self, desk: Bridge, model: TextModel, clock: Clock) -> None:
        self._desk, self._model, self._clock = desk, model, clock
        self._control = frozenset(model.vocabulary.control.values())

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """By method and path."""
        return {("POST", "/v1/completions"): self._complete, ("GET", "/v1/models"): self._models}

    async def _models(self, body: bytes) -> AsyncIterator[Answer]:
        listed = {"object": "list", "data": [{"id": self._model.name, "object": "model"}]}
        yield Plain(msgspec.json.encode(listed))

    async def _complete(self, body: bytes) -> AsyncIterator[Answer]:
        request = read(CompletionRequest, body)
        if request.model not in ("", self._model.name):
            raise Refused(404, f"no model {request.model!r} here; this is {self._model.name!r}")
        name = request.request_id or f"cmpl-{secrets.token_hex(8)}"
        lines = self._lines(request, name)
        async with self._desk.job(lines, stream=request.stream, priority=request.priority) as job:
            created = int(self._clock.wall())
            answer = _Answer(request, self._model, self._control, name, created, job, self._leave)
            yield Events(answer.events()) if request.stream else Plain(await answer.whole())

    async def _leave(self, name: str) -> None:
        """One completion is done before the engine knows: its text ended."""
        await self._desk.abort([name], None)

    def _lines(self, request: CompletionRequest, name: str) -> list[Line]:
        sampling = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            max_tokens=request.max_tokens,
            stop=request.stops,
            stop_token_ids=() if request.ignore_eos else self._model.end,
            seed=secrets.randbits(31) if request.seed is None else request.seed,
            n=request.n,
            logprobs=request.logprobs,
        ).sampling()
        prompts = [ids(tuple(tokens)) for tokens in self._prompts(request.prompt)]
        if len(prompts) * request.n > MOST:
            raise ValueError(f"{len(prompts)} prompts of n = {request.n}: at most {MOST} completions at once")
        return [
            Line(f"{name}/{i}/{k}", prompt, sampling)
            for i, prompt in enumerate(prompts)
            for k in range(request.n)
        ]

    def _prompts(self, given: str | Sequence[Any]) -> list[list[int]]:
        if isinstance(given, str):
            return [self._model.encode(given)]
        if given and all(isinstance(each, int) for each in given):
            return [list(given)]
        if not given or any(isinstance(each, int) for each in given):
            raise ValueError("prompt: expected a text, a list of ids, or a list of either")
        return [self._model.encode(each) if isinstance(each, str) else each for each in given]


class _Answer:
    """One job's choices as text."""

    def __init__(
        self,
        request: CompletionRequest,
        model: TextModel,
        control: frozenset[int],
        name: str,
        created: int,
        job: Answers,
        leave: Callable[[str], Awaitable[None]],
    ) -> None:
        self._leave, self._over = leave, set[int]()
        self._request, self._model, self._name, self._created, self._job = request, model, name, created, job
        self._texts = [
            TextStream(model.vocabulary.pieces, control, request.stops) for _ in range(len(job.names))
        ]
        self._made = 0

    async def whole(self) -> bytes:
        """Everything, when it is done."""
        choices = []
        while choice := await self._job.next():
            choices.append(self._choice(choice))
        choices.sort(key=lambda each: each.index)
        return msgspec.json.encode(self._record(choices, self._usage()))

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece; a piece without text or end is left out, unless its ids are wanted."""
        while choice := await self._job.next():
            if choice.index in self._over:
                continue
            told = self._choice(choice)
            if told.finish_reason is not None:
                self._over.add(choice.index)
                if choice.finish_reason is None:
                    await self._leave(choice.request_id)
            if told.text or told.finish_reason or self._request.return_token_ids:
                yield msgspec.json.encode(self._record([told]))
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield msgspec.json.encode(self._record([], self._usage()))

    def _choice(self, choice: Choice) -> TextChoice:
        text, request = self._texts[choice.index], self._request
        said = text.push(choice.token_ids)
        if choice.finish_reason is not None:
            said += text.end()
        # a stop string over bytes that are no text, or over a hidden token, is seen here only
        finish = Finish.STOP if text.stopped else choice.finish_reason
        self._made += len(choice.token_ids)
        logprobs = None
        if request.logprobs is not None:
            pieces = self._model.vocabulary.pieces
            logprobs = TokenLogprobs(
                tokens=[spelt(pieces, id).decode("utf-8", "replace") for id in choice.token_ids],
                token_logprobs=[each.logprob for each in choice.logprobs.content],
            )
        return TextChoice(
            index=choice.index,
            text=said,
            finish_reason=finish,
            logprobs=logprobs,
            token_ids=choice.token_ids if request.return_token_ids else None,
        )

    def _usage(self) -> Usage:
        prompt = self._job.prompt_tokens // max(self._request.n, 1)
        return Usage(prompt_tokens=prompt, completion_tokens=self._made, total_tokens=prompt + self._made)

    def _record(self, choices: list[TextChoice], usage: Usage | None = None) -> TextCompletion:
        return TextCompletion(
            id=self._name, created=self._created, model=self._model.name, choices=choices, usage=usage
        )
