"""Requests and weights as they travel."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engine.remote.address import Address, read, write
from rollwright.engine.serve.auth import Token
from rollwright.engine.serve.completions import CompletionRequest
from rollwright.engine.serve.weights import WeightsFolder
from rollwright.engine.serve.wire import (
    Generated,
    GenerateRequest,
    SamplingParams,
    chunk,
    completion,
    piece,
    whole,
)
from rollwright.errors import ConfigError, ConstraintError, SchemaError, StoreError
from rollwright.model.state import decode, encode
from rollwright.types import (
    Chunk,
    Completion,
    Constraint,
    ConstraintKind,
    Finish,
    PolicyVersion,
    Sampling,
    VersionSpan,
)

V = PolicyVersion(run="r", incarnation=2, step=5)
SOURCES = {
    ConstraintKind.JSON_SCHEMA: '{"type": "object"}',
    ConstraintKind.REGEX: r"\d+é",
    ConstraintKind.GRAMMAR: 'start: "a"',
    ConstraintKind.CHOICE: '["a", "b"]',
    ConstraintKind.TOOLS: '[{"name": "f", "parameters": {}}]',
}


@pytest.mark.parametrize("kind", [None, *ConstraintKind])
def test_sampling_comes_through_as_it_was(kind: ConstraintKind | None) -> None:
    constraint = None if kind is None else Constraint(kind=kind, source=SOURCES[kind])
    given = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        max_tokens=3,
        stop=(1, -1),
        stop_text=("é",),
        seed=9,
        constraint=constraint,
    )
    data = msgspec.json.encode(SamplingParams.of(given))
    assert msgspec.json.decode(data, type=SamplingParams).sampling() == given


@pytest.mark.parametrize(
    "body",
    [
        b'{"n": 0}',
        b'{"n": 1000}',
        b'{"stop": [""]}',
        b'{"logprobs": 5}',
        b'{"structured_outputs": {}}',
        b'{"structured_outputs": {"regex": "a", "choice": ["a"]}}',
        b'{"presence_penalty": 1.0}',
        b'{"stop_token_ids": [' + b", ".join([b"1"] * 257) + b"]}",
        b'{"stop_token_ids": [2147483648]}',
        b'{"stop": [' + b", ".join([b'"a"'] * 257) + b"]}",
        b'{"temperature": 1e300}',
        b'{"top_p": 1e999}',
        b'{"min_p": NaN}',
        b'{"top_k": 2147483648}',
        b'{"max_tokens": 99999999999999999999}',
    ],
)
def test_what_would_be_left_out_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)):
        msgspec.json.decode(body, type=SamplingParams).sampling()


@pytest.mark.parametrize("priority", [2**31, -(2**31), 2**63, 2**70])
def test_a_priority_has_32_bits(priority: int) -> None:
    for kind, rest in ((GenerateRequest, '"token_ids": [1]'), (CompletionRequest, '"prompt": "a"')):
        msgspec.json.decode(f'{{{rest}, "priority": {2**31 - 1}}}', type=kind)
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(f'{{{rest}, "priority": {priority}}}', type=kind)


def test_a_choice_that_is_none_is_no_constraint() -> None:
    wrong = Sampling(constraint=Constraint(kind=ConstraintKind.CHOICE, source="nothing"))
    with pytest.raises(ConstraintError):
        SamplingParams.of(wrong)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e3, 0, width=32)), max_size=5))
def test_ids_and_float32_logprobs_come_through_exactly(tokens: list[tuple[int, float]]) -> None:
    done = Completion(
        request="x",
        tokens=np.array([t for t, _ in tokens], np.int32),
        logprobs=np.array([p for _, p in tokens], np.float32),
        spans=(VersionSpan(version=V, start=0, end=len(tokens)),),
        finish=Finish.STOP,
        prompt_tokens=3,
        cached=2,
        compliant=True,
    )
    sent = msgspec.json.encode(Generated(request_id="x", choices=[whole(done, 0)], prompt_tokens=3))
    back = completion(msgspec.json.decode(sent, type=Generated).choices[0], 3)
    assert back.tokens.tolist() == done.tokens.tolist() and back.tokens.dtype == np.int32
    assert back.logprobs.tobytes() == done.logprobs.tobytes()
    assert (back.spans, back.finish, back.cached, back.compliant) == (done.spans, done.finish, 2, True)
    part = Chunk(request="x", tokens=done.tokens, logprobs=done.logprobs, version=V, finish=None)
    again = chunk(piece(part, 0))
    assert (again.tokens.tolist(), again.version, again.finish) == (done.tokens.tolist(), V, None)


def test_weights_have_the_format_of_the_weights_channel(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    state["tied"] = state["a"]
    folder = WeightsFolder(tmp_path)
    digest = folder.put(state)
    assert digest == hashlib.sha256(encode(state)).hexdigest()
    assert folder.get(digest).keys() == state.keys()
    assert folder.put(state) == digest
    assert torch.equal(folder.get(digest)["b"], state["b"])


def test_weights_stay_until_the_last_who_put_them_releases_them(tmp_path: Path) -> None:
    one, other, state = WeightsFolder(tmp_path), WeightsFolder(tmp_path), {"a": torch.ones(1)}
    digest = one.put(state)
    assert other.put(state) == digest
    one.release(digest)
    assert torch.equal(other.get(digest)["a"], state["a"]), "removed while another may read them"
    other.release(digest)
    with pytest.raises(StoreError, match="no weights"):
        other.get(digest)


def test_weights_that_were_there_before_are_nobodys_to_remove(tmp_path: Path) -> None:
    folder, data = WeightsFolder(tmp_path), encode({"a": torch.ones(1)})
    digest = hashlib.sha256(data).hexdigest()
    (tmp_path / digest[:2]).mkdir()
    (tmp_path / digest[:2] / digest[2:]).write_bytes(data)
    assert folder.put({"a": torch.ones(1)}) == digest
    folder.release(digest)
    assert folder.get(digest)


def test_only_a_digest_names_weights_and_only_whole_ones_are_read(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path / "weights")
    for name in ("../secret", "/etc/passwd", "", "A" * 64):
        with pytest.raises(StoreError, match="names no weights"):
            folder.get(name)
    digest = folder.put({"a": torch.ones(1)})
    path = tmp_path / "weights" / digest[:2] / digest[2:]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="damaged"):
        folder.get(digest)
    with pytest.raises(StoreError, match="no weights"):
        folder.get("0" * 64)
    with pytest.raises(SchemaError):
        decode(b"\x80\x04pickle")


def test_a_token_admits_its_bearer_alone_and_shows_itself_nowhere() -> None:
    token = Token("a-secret-of-sixteen")
    assert token.admits(b"Bearer a-secret-of-sixteen") and token.admits(b"bearer a-secret-of-sixteen")
    for wrong in (
        b"",
        b"Bearer",
        b"Bearer ",
        b"a-secret-of-sixteen",
        b"Bearer a-secret-of-sixteem",
        b"Basic x",
    ):
        assert not token.admits(wrong)
    assert "secret" not in repr(token)
    for weak in ("", "short", "with space in it all", "ü" * 20):
        with pytest.raises(ConfigError):
            Token(weak)


def test_the_address_file_is_its_owners_alone(tmp_path: Path) -> None:
    path, address = tmp_path / "serve.json", Address("http://h:1", "t" * 16, "http://h:2", "c" * 16)
    path.write_text("old")
    path.chmod(0o644)
    write(path, address, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600 and read(path) == (address, tmp_path)
    assert "tttt" not in repr(address) and "cccc" not in repr(address)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        read(path)
    with pytest.raises(ConfigError, match="no address"):
        read(tmp_path / "nowhere.json")
