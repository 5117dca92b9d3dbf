"""The ports over a real server on loopback: who may, what is refused, what a client leaves behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from opened import until_end
from served import Served
from torch import Tensor

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.remote.address import Address
from rollwright.engine.remote.engine import RemoteEngine
from rollwright.engine.serve.completions import TextModel
from rollwright.engine.serve.server import loopback
from rollwright.engine.serve.weights import WeightsFolder
from rollwright.errors import ConfigError, EngineClosed, EngineError
from rollwright.events import NullSink
from rollwright.model.config import ModelConfig
from rollwright.model.decoder import Decoder
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.types import PolicyVersion, Sampling

CODEC = PieceTokenizer(["é", "😀", "the "], ["<end>"])
CONTEXT = 512


class Slow(Decoder):
    """Takes its time, so that something can happen meanwhile."""

    pace = 0.0

    def forward(self, ids: Tensor, positions: Tensor, attend: Any, keep: Tensor | None = None) -> Tensor:
        SystemClock().pause(self.pace)
        return super().forward(ids, positions, attend, keep)


def engine(pace: float = 0.0) -> Engine:
    shape = ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn=32, context=CONTEXT)
    model = Slow(shape, CODEC.size)
    model.initialise(torch.Generator().manual_seed(0))
    model.pace = pace
    version = PolicyVersion(run="r")
    return EmbeddedConfig().build(model, version, SystemClock(), NullSink(), None, CODEC.vocabulary())


TEXT = TextModel(
    name="tiny", vocabulary=CODEC.vocabulary(), encode=CODEC.encode, end=(CODEC.control("<end>"),)
)


def serve(pace: float = 0.0, weights: Path | None = None) -> Served:
    return until_end(Served(lambda: engine(pace), weights, TEXT))


def client(served: Served, *, control: bool = False, token: str | None = None) -> httpx.AsyncClient:
    address = served.address
    own = address.control_token if control else address.token
    return httpx.AsyncClient(
        base_url=address.control_url if control else address.url,
        headers={"authorization": f"Bearer {own if token is None else token}"},
        timeout=20,
        trust_env=False,
    )


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


async def test_each_port_asks_for_its_own_token() -> None:
    served = serve()
    address = served.address
    for control, token in (
        (False, "x"),
        (False, "wrong"),
        (False, address.control_token),
        (True, address.token),
    ):
        async with client(served, control=control, token=token) as http:
            for path in ("/health", "/nothing"):
                assert (await http.get(path)).status_code == 401
            assert (await http.post("/inference/v1/generate", content=b"x" * 100)).status_code == 401
    async with client(served) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/control/v1/pause", json={})).status_code == 404, (
            "control on the public port"
        )


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/inference/v1/generate", b"{", 400, "not a request"),
        ("/inference/v1/generate", b'{"token_ids": []}', 400, "at least one"),
        ("/inference/v1/generate", b'{"token_ids": [1], "cache_salt": "x"}', 400, "cache_salt"),
        ("/inference/v1/generate", b'{"token_ids": [99999999999]}', 400, "ids are"),
        ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"n": 0}}', 400, "n: expected"),
        ("/v1/completions", b'{"prompt": "a", "echo": true}', 400, "echo"),
        ("/v1/completions", b'{"prompt": "a", "model": "gpt"}', 404, "tiny"),
        ("/v1/completions", b'{"prompt": []}', 400, "prompt"),
        ("/v1/score", b'{"token_ids": [1, 2], "temperature": 0}', 400, "temperature"),
        ("/inference/v1/abort", b'{"requests": ["x"]}', 400, "owner"),
        ("/nowhere", b"{}", 404, "nothing at"),
        ("/health", b"{}", 405, "another method"),
        ("/v1/score", b"1" * (17 << 20), 413, "bytes"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(path: str, body: bytes, status: int, says: str) -> None:
    async with client(serve()) as http:
        answer = await http.post(path, content=body)
        assert answer.status_code == status and says in answer.json()["error"]["message"]


async def test_several_completions_of_one_prompt_and_their_scores() -> None:
    async with client(serve()) as http:
        params = {"max_tokens": 5, "n": 3, "seed": 2}
        asked = {"token_ids": [1, 2, 3], "request_id": "x", "sampling_params": params}
        whole = (await http.post("/inference/v1/generate", json=asked)).json()
        assert [each["request_id"] for each in whole["choices"]] == ["x/0", "x/1", "x/2"]
        assert len({tuple(each["token_ids"]) for each in whole["choices"]}) > 1
        pieces: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async with http.stream("POST", "/inference/v1/generate", json={**asked, "stream": True}) as answer:
            async for event in events(answer):
                for choice in event["choices"]:
                    pieces[choice["index"]] += choice["token_ids"]
        assert [pieces[each["index"]] for each in whole["choices"]] == [
            each["token_ids"] for each in whole["choices"]
        ]
        row = [1, 2, 3, *whole["choices"][0]["token_ids"]]
        scored = (await http.post("/v1/score", json={"token_ids": row})).json()["logprobs"]
        given = [each["logprob"] for each in whole["choices"][0]["logprobs"]["content"]]
        assert scored[2:] == pytest.approx(given, abs=1e-5)


async def test_text_streams_whole_characters_and_stops_before_its_stop_string() -> None:
    async with client(serve()) as http:
        asked = {
            "prompt": "héllo 😀",
            "max_tokens": 60,
            "seed": 1,
            "request_id": "t",
            "return_token_ids": True,
        }
        whole = (await http.post("/v1/completions", json=asked)).json()
        (choice,) = whole["choices"]
        kept = [id for id in choice["token_ids"] if id != CODEC.control("<end>")]
        assert choice["text"] == CODEC.decode(kept)
        assert whole["usage"]["prompt_tokens"] == len(CODEC.encode("héllo 😀"))
        said = ""
        async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
            async for event in events(answer):
                said += event["choices"][0]["text"]
        assert said == choice["text"]
        stop = choice["text"][3:6]
        cut = (await http.post("/v1/completions", json={**asked, "stop": stop})).json()["choices"][0]
        assert cut["text"] == choice["text"][: choice["text"].index(stop)] and cut["finish_reason"] == "stop"
        said, ends = "", []
        async with http.stream(
            "POST", "/v1/completions", json={**asked, "stop": stop, "stream": True}
        ) as answer:
            async for event in events(answer):
                said += event["choices"][0]["text"]
                ends.append(event["choices"][0]["finish_reason"])
        assert said == cut["text"] and ends[-1] == "stop" and ends.count(None) == len(ends) - 1


async def test_a_client_that_goes_away_has_its_requests_aborted() -> None:
    served = serve(pace=0.01)
    async with client(served) as http:
        asked = {"token_ids": [1], "sampling_params": {"max_tokens": 400}, "request_id": "x"}
        async with http.stream("POST", "/inference/v1/generate", json={**asked, "stream": True}) as answer:
            await anext(events(answer))
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/inference/v1/generate", json={**asked, "request_id": "y"}, timeout=0.2)
        for _ in range(100):
            health = (await http.get("/health")).json()
            if health["running"] == health["waiting"] == 0:
                break
            await asyncio.sleep(0.02)
        assert health["running"] == health["waiting"] == 0
        assert health["sampled_tokens"] < 400


async def test_only_its_owner_or_control_ends_a_request() -> None:
    served = serve(pace=0.02)
    async with client(served) as http, client(served, control=True) as control:
        asked = {"token_ids": [1], "sampling_params": {"max_tokens": 400}, "request_id": "x", "owner": "me"}
        task = asyncio.create_task(http.post("/inference/v1/generate", json=asked))
        for _ in range(200):
            if (await http.get("/health")).json()["running"]:
                break
            await asyncio.sleep(0.01)
        wrong = await http.post("/inference/v1/abort", json={"requests": ["x"], "owner": "you"})
        assert wrong.status_code == 200 and (await http.get("/health")).json()["running"] == 1
        await control.post("/control/v1/abort", json={"requests": ["x"]})
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_server_without_a_weights_folder_takes_none_and_says_so(tmp_path: Path) -> None:
    remote = RemoteEngine(serve().address, SystemClock(), NullSink(), folder=tmp_path)
    await remote.start()
    try:
        with pytest.raises(EngineError, match="takes no weights"):
            await remote.update({"a": torch.ones(1)}, PolicyVersion(run="r", step=1))
        assert not [path for path in tmp_path.rglob("*") if path.is_file()], "left what nobody took"
        neighbour, state = WeightsFolder(tmp_path), {"a": torch.ones(2)}
        digest = neighbour.put(state)
        with pytest.raises(EngineError, match="takes no weights"):
            await remote.update(state, PolicyVersion(run="r", step=1))
        assert neighbour.get(digest), "removed what another replica's server may still read"
    finally:
        await remote.close()


async def test_without_a_control_port_an_engine_can_be_used_not_controlled() -> None:
    served = serve()
    address = Address(url=served.address.url, token=served.address.token)
    remote = RemoteEngine(address, SystemClock(), NullSink())
    await remote.start()
    try:
        done = await remote.generate(torch.tensor([1, 2]).numpy(), Sampling(max_tokens=2), request="x")
        assert len(done.tokens) == 2
        with pytest.raises(EngineError, match="cannot be controlled"):
            await remote.pause()
    finally:
        await remote.close()


async def test_a_wrong_token_is_said_at_the_start_and_no_server_after_its_patience() -> None:
    served = serve()
    wrong = Address(url=served.address.url, token="wrong")
    remote = RemoteEngine(wrong, SystemClock(), NullSink())
    with pytest.raises(EngineError, match="token"):
        await remote.start()
    await remote.close()
    served.close()
    gone = RemoteEngine(served.address, SystemClock(), NullSink(), patience=0.0)
    with pytest.raises(EngineClosed, match="no server answers"):
        await gone.start()
    await gone.close()


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_what_loopback_is(host: str, own: bool) -> None:
    assert loopback(host) is own


def test_no_such_host_is_said() -> None:
    with pytest.raises(ConfigError, match="--host"):
        loopback("no such host.invalid")
