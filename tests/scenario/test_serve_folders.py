"""`rollwright serve` of what people have: a run's folder, and a Hugging Face model's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from in_process import run
from serving import serving

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import RemoteConfig
from rollwright.engine.remote.address import read
from rollwright.errors import ConfigError
from rollwright.events import NullSink
from rollwright.run.folder import RunFolder
from rollwright.run.serving import is_model, of_folder, of_run
from rollwright.types import Ints, PolicyVersion, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=12)


@asynccontextmanager
async def client(address: Path) -> AsyncIterator[Engine]:
    engine = RemoteConfig(address=str(address)).build(None, PolicyVersion(run="x"), SystemClock(), NullSink())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def completed(address: Path, prompt: str) -> dict[str, object]:
    """What `/v1/completions` says."""
    found, _ = read(address)
    async with httpx.AsyncClient(trust_env=False) as http:
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0}
        headers = {"authorization": f"Bearer {found.token}"}
        answer = await http.post(f"{found.url}/v1/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


async def greedy(engine: Engine, prompt: Ints) -> list[int]:
    await engine.start()
    try:
        return (await engine.generate(prompt, GREEDY, request="x")).tokens.tolist()
    finally:
        await engine.close()


async def test_a_run_is_served_from_its_last_commit(tmp_path: Path) -> None:
    folder = await run(tmp_path / "runs", "warmstart={steps=3, batch=4}", "evaluation.tasks=2")
    assert not is_model(folder.path)
    policy = of_run(RunFolder(folder.path), SystemClock(), NullSink())
    assert policy.version.run == folder.id and policy.weights == folder.blobs / "weights"
    text = "who is the boss?"
    prompt = np.array(policy.text.encode(text), np.int32)
    expected = await greedy(policy.engine, prompt)
    address = tmp_path / "serve.json"
    with serving(address, str(folder.path)):
        async with client(address) as engine:
            health = await engine.health()
            assert health.version == policy.version and health.ready
            done = await engine.generate(prompt, GREEDY, request="x")
            assert done.tokens.tolist() == expected
            scores = await engine.score(np.concatenate([prompt, done.tokens]))
            assert np.allclose(scores[len(prompt) - 1 :], done.logprobs, atol=1e-5)
        told = await completed(address, text)
        pieces = policy.text.vocabulary.pieces
        ends = set(policy.text.end)
        spelled = b"".join(pieces[id] for id in expected if id not in ends).decode(errors="replace")
        assert str(told["text"]).startswith(spelled[:4]) and told["finish_reason"] in ("stop", "length")


def saved(folder: Path, name: str, dtype: torch.dtype) -> object:
    """A tiny model with a tokenizer in `folder`; the model."""
    from chat_styles import byte_level
    from tiny_hf import tiny

    codec = byte_level()
    lm = tiny(name, vocab_size=codec.size)
    lm.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(codec.to_json(), encoding="utf-8")
    return lm.to(torch.float32)


@torch.inference_mode()
def theirs(lm: object, prompt: list[int]) -> list[int]:
    """Greedy ids by transformers' own forward."""
    row = list(prompt)
    for _ in range(GREEDY.max_tokens):
        logits = lm(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]  # type: ignore[operator]
        row.append(int(logits.argmax()))
    return row[len(prompt) :]


@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", torch.float32), ("llama", torch.bfloat16), ("phi3", torch.bfloat16)]
)
async def test_a_folder_of_any_precision_is_served_in_float32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    lm = saved(tmp_path, name, dtype)
    assert is_model(tmp_path)
    policy = of_folder(tmp_path, SystemClock(), NullSink())
    prompt = policy.text.encode("Where is it?")
    assert await greedy(policy.engine, np.array(prompt, np.int32)) == theirs(lm, prompt)


@pytest.mark.needs("transformers")
async def test_a_hugging_face_folder_behind_http(tmp_path: Path) -> None:
    model = tmp_path / "some-model"
    model.mkdir()
    lm = saved(model, "llama", torch.bfloat16)
    address = tmp_path / "serve.json"
    with serving(address, str(model), "--device", "cpu"):
        policy = of_folder(model, SystemClock(), NullSink())
        prompt = policy.text.encode("Where is it?")
        async with client(address) as engine:
            assert (await engine.health()).version == PolicyVersion(run="some-model")
            done = await engine.generate(np.array(prompt, np.int32), GREEDY, request="x")
        assert done.tokens.tolist() == theirs(lm, prompt)
        assert (await completed(address, "Where is it?"))["finish_reason"] == "length"


def test_a_folder_that_is_neither_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        of_folder(tmp_path, SystemClock(), NullSink())
