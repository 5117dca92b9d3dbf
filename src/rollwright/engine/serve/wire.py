"""What travels between server and clients, as JSON.

Role: the records of the token endpoint, in the words of vLLM's `/inference/v1/generate` where it has words
for them. Neighbours: `app` reads and writes them, `remote` too. Invariants: ids, float32 logprobs and version
spans come back exactly as the engine gave them; a field that isn't known is refused, because leaving out what
was asked for would change what is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from rollwright.errors import ConstraintError
from rollwright.types import (
    Chunk,
    Completion,
    Constraint,
    ConstraintKind,
    Finish,
    PolicyVersion,
    Probe,
    Sampling,
    VersionSpan,
)

Number = Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)]
"""A number of 32 bits, as engines keep them."""
Finite = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""A number that float32 holds."""
STOPS = 256
"""Most ids, and most strings, that may end one completion."""


class Wire(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a client sends: unknown fields are refused."""


class StructuredOutputs(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint; exactly one of these."""

    json: Raw | UnsetType = UNSET
    """A JSON schema, as an object or as text that holds one."""
    regex: str | UnsetType = UNSET
    grammar: str | UnsetType = UNSET
    choice: tuple[str, ...] | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    """A list of tools (name, parameters), as JSON or as text that holds it."""

    def constraint(self) -> Constraint:
        """As the engine takes it.

        Raises:
            ValueError: none, or more than one.
        """
        given: list[tuple[ConstraintKind, str]] = []
        if self.json is not UNSET:
            given.append((ConstraintKind.JSON_SCHEMA, _source(self.json)))
        if self.tools is not UNSET:
            given.append((ConstraintKind.TOOLS, _source(self.tools)))
        if self.regex is not UNSET:
            given.append((ConstraintKind.REGEX, self.regex))
        if self.grammar is not UNSET:
            given.append((ConstraintKind.GRAMMAR, self.grammar))
        if self.choice is not UNSET:
            given.append((ConstraintKind.CHOICE, json.dumps(self.choice)))
        if len(given) != 1:
            raise ValueError("structured_outputs: give exactly one of json, regex, grammar, choice, tools")
        kind, source = given[0]
        return Constraint(kind=kind, source=source)

    @classmethod
    def of(cls, constraint: Constraint) -> StructuredOutputs:
        """The other way. Sources travel as text, so that not a byte of them changes.

        Raises:
            ConstraintError: a choice that is no list of strings.
        """
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                return cls(json=Raw(json.dumps(constraint.source).encode()))
            case ConstraintKind.TOOLS:
                return cls(tools=Raw(json.dumps(constraint.source).encode()))
            case ConstraintKind.REGEX:
                return cls(regex=constraint.source)
            case ConstraintKind.GRAMMAR:
                return cls(grammar=constraint.source)
            case ConstraintKind.CHOICE:
                return cls(choice=_choices(constraint.source))


def _choices(source: str) -> tuple[str, ...]:
    try:
        return tuple(msgspec.json.decode(source, type=list[str]))
    except msgspec.DecodeError as error:
        raise ConstraintError(f"a choice is a JSON list of strings, got {source[:80]!r}: {error}") from error


def _source(raw: Raw) -> str:
    text = bytes(raw).decode()
    value = json.loads(text)
    return value if isinstance(value, str) else text


class SamplingParams(Wire, frozen=True, kw_only=True):
    """See `types.Sampling`."""

    temperature: Finite = 1.0
    top_p: Finite = 1.0
    top_k: Number = 0
    min_p: Finite = 0.0
    max_tokens: Number = 64
    stop_token_ids: Annotated[tuple[Number, ...], Meta(max_length=STOPS)] = ()
    stop: Annotated[tuple[str, ...], Meta(max_length=STOPS)] = ()
    seed: int = 0
    n: int = 1
    """Completions of this one prompt; the i-th is request `id/i` where there are several."""
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = 0
    """Taken for compatibility: the logprob of the sampled token always comes, alternatives never."""

    def sampling(self) -> Sampling:
        """As the engine takes it.

        Raises:
            ValueError: `n` below 1, alternatives asked for, an empty stop string, no or several constraints.
        """
        if not 1 <= self.n <= MOST:
            raise ValueError(f"n: expected 1 … {MOST} completions of one prompt, got {self.n}")
        if self.logprobs:
            raise ValueError(f"logprobs = {self.logprobs}: only the sampled token's logprob is given; ask 0")
        if "" in self.stop:
            raise ValueError("stop: an empty string would end every completion before it began")
        outputs = self.structured_outputs
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=self.stop_token_ids,
            stop_text=self.stop,
            seed=self.seed,
            constraint=None if outputs is None else outputs.constraint(),
        )

    @classmethod
    def of(cls, sampling: Sampling) -> SamplingParams:
        """The other way."""
        constraint = sampling.constraint
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop,
            stop=sampling.stop_text,
            seed=sampling.seed,
            structured_outputs=None if constraint is None else StructuredOutputs.of(constraint),
        )


MOST = 128
"""Most completions of one prompt in one request."""


class GenerateRequest(Wire, frozen=True, kw_only=True):
    """Continue `token_ids`."""

    token_ids: tuple[int, ...]
    request_id: str = ""
    """Unique among those in flight; keys the noise together with the seed. Empty: the server makes one."""
    sampling_params: SamplingParams = SamplingParams()
    session: str = ""
    priority: Number = 0
    stream: bool = False
    owner: str = ""
    """A secret of the client's: who knows it may abort this request over the public port."""
    whole: bool = False
    """With `stream`: one event, when all is done (the comments before it say that the server lives)."""


class Logprob(Struct, frozen=True, kw_only=True):
    """One sampled token."""

    token_id: int
    logprob: float


class Logprobs(Struct, frozen=True, kw_only=True):
    """Those of a choice, in order."""

    content: list[Logprob]


class Span(Struct, frozen=True, kw_only=True):
    """Tokens `[start, end)` of this choice, or of this piece of it, came from `version`."""

    version: str
    start: int
    end: int
    policy: PolicyVersion


class Choice(Struct, frozen=True, kw_only=True):
    """One completion, or one piece of it."""

    request_id: str
    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[Span]
    finish_reason: Finish | None
    index: int = 0
    cached_tokens: int | None = None
    """Prompt tokens whose KV was cached; None where the engine doesn't say (streams)."""
    compliant: bool | None = None


class Generated(Struct, frozen=True, kw_only=True):
    """The answer, and each event of a stream."""

    request_id: str
    choices: list[Choice]
    prompt_tokens: int


class ScoreRequest(Wire, frozen=True, kw_only=True):
    """log p(token_ids[i+1] | token_ids[:i+1])."""

    token_ids: tuple[int, ...]
    temperature: Finite = 1.0


class Scores(Struct, frozen=True, kw_only=True):
    """One fewer than the ids."""

    logprobs: list[float]


class AbortRequest(Wire, frozen=True, kw_only=True):
    """End these. On the public port `owner` must be the one that they were sent with."""

    requests: tuple[str, ...]
    owner: str = ""


class PauseRequest(Wire, frozen=True, kw_only=True):
    """See `engine.base.PauseMode`."""

    mode: str = "wait"


class UpdateRequest(Wire, frozen=True, kw_only=True):
    """Take the weights that lie in the server's weights folder under `digest`."""

    digest: str
    version: PolicyVersion
    probe_tokens: tuple[int, ...] | None = None
    probe_logprobs: tuple[Finite, ...] | None = None
    in_flight: str = "continue"

    def probe(self) -> Probe | None:
        """Tokens and logprobs, where both are given."""
        if self.probe_tokens is None or self.probe_logprobs is None:
            return None
        return Probe(
            tokens=np.array(self.probe_tokens, np.int32), logprobs=np.array(self.probe_logprobs, np.float32)
        )


class Done(Struct, frozen=True, kw_only=True):
    """A control call succeeded."""

    held: list[str] = []
    """After a pause: the requests that wait."""
    gap: float = 0.0
    """After an update: the largest difference to the probe, in nats."""


class Failure(Struct, frozen=True, kw_only=True):
    """What went wrong: the name of an error of `rollwright.errors`, or of Python's."""

    type: str
    message: str


class Failed(Struct, frozen=True, kw_only=True):
    """The body of an answer that is none."""

    error: Failure


def logprobs_of(ids: Sequence[int], logprobs: Sequence[float]) -> Logprobs:
    """Side by side."""
    return Logprobs(content=[Logprob(token_id=i, logprob=p) for i, p in zip(ids, logprobs, strict=True)])


def span(part: VersionSpan) -> Span:
    """A span as it travels."""
    return Span(version=str(part.version), start=part.start, end=part.end, policy=part.version)


def whole(done: Completion, index: int) -> Choice:
    """A completion as it travels."""
    ids: list[int] = done.tokens.tolist()
    return Choice(
        request_id=done.request,
        index=index,
        token_ids=ids,
        logprobs=logprobs_of(ids, done.logprobs.tolist()),
        weight_versions=[span(part) for part in done.spans],
        finish_reason=done.finish,
        cached_tokens=done.cached,
        compliant=done.compliant,
    )


def piece(chunk: Chunk, index: int) -> Choice:
    """A piece of a stream as it travels."""
    ids: list[int] = chunk.tokens.tolist()
    return Choice(
        request_id=chunk.request,
        index=index,
        token_ids=ids,
        logprobs=logprobs_of(ids, chunk.logprobs.tolist()),
        weight_versions=[span(VersionSpan(version=chunk.version, start=0, end=len(ids)))],
        finish_reason=chunk.finish,
    )


def completion(choice: Choice, prompt_tokens: int) -> Completion:
    """A whole choice as an engine gives it."""
    return Completion(
        request=choice.request_id,
        tokens=np.array(choice.token_ids, np.int32),
        logprobs=_floats(choice),
        spans=tuple(
            VersionSpan(version=each.policy, start=each.start, end=each.end)
            for each in choice.weight_versions
        ),
        finish=choice.finish_reason or Finish.ABORT,
        prompt_tokens=prompt_tokens,
        cached=choice.cached_tokens or 0,
        compliant=choice.compliant,
    )


def chunk(choice: Choice) -> Chunk:
    """A piece as an engine gives it."""
    return Chunk(
        request=choice.request_id,
        tokens=np.array(choice.token_ids, np.int32),
        logprobs=_floats(choice),
        version=choice.weight_versions[0].policy,
        finish=choice.finish_reason,
    )


def _floats(choice: Choice) -> Any:
    return np.array([each.logprob for each in choice.logprobs.content], np.float32)
