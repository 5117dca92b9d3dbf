"""`rollwright serve` as a process: its address file, signals, a kill, what it refuses to start with."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving import COMMAND, environment
from serving import serving as served

from rollwright.clock import SystemClock
from rollwright.engine.config import RemoteConfig
from rollwright.engine.remote.address import read
from rollwright.errors import EngineClosed
from rollwright.events import NullSink
from rollwright.types import Finish, PolicyVersion, Sampling

CONFIG = '[tasks]\ntype = "records"\n[model]\ndim = 32\nlayers = 1\nffn = 32\n'
PROMPT = np.arange(1, 20, dtype=np.int32)


@contextmanager
def serving(folder: Path, *options: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A server of a fresh model, its address in `serve.json`; dead at the end."""
    (folder / "fresh.toml").write_text(CONFIG)
    given = ("--fresh", "fresh.toml", "--weights", str(folder / "weights"), *options)
    with served(folder / "serve.json", *given, **more) as process:
        yield process


def refused(folder: Path, *options: str, **more: str) -> str:
    """What a server that cannot start says, in one line."""
    (folder / "fresh.toml").write_text(CONFIG)
    done = subprocess.run(
        [*COMMAND, *options],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    assert not (folder / "serve.json").exists()
    return done.stderr


async def test_a_signal_lets_what_is_under_way_end_and_takes_nothing_more(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        address, weights = read(tmp_path / "serve.json")
        assert weights == tmp_path / "weights"
        config = RemoteConfig(address=str(tmp_path / "serve.json"))
        engine = config.build(None, PolicyVersion(run="x"), SystemClock(), NullSink())
        await engine.start()
        try:
            stream = engine.stream(PROMPT, Sampling(max_tokens=300), request="x")
            chunks = [await anext(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += [chunk async for chunk in stream]
            assert sum(len(chunk.tokens) for chunk in chunks) == 300 and chunks[-1].finish is Finish.LENGTH
            with pytest.raises(EngineClosed):
                await engine.generate(PROMPT, Sampling(), request="late")
        finally:
            await engine.close()
        said = process.communicate(timeout=20)[0]
        assert process.returncode == 0 and "serving" in said
        assert address.token not in said and address.control_token not in said
        assert not (tmp_path / "serve.json").exists()


async def test_what_outlives_the_deadline_is_aborted(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain", "0") as process:
        engine = RemoteConfig(address=str(tmp_path / "serve.json")).build(
            None, PolicyVersion(run="x"), SystemClock(), NullSink()
        )
        await engine.start()
        try:
            await engine.pause()  # so that it would never end
            task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=9), request="x"))
            while (await engine.health()).waiting == 0:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert (await task).finish is Finish.ABORT
        finally:
            await engine.close()
        process.communicate(timeout=20)
        assert process.returncode == 0


async def test_a_killed_server_ends_every_request_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        config = RemoteConfig(address=str(tmp_path / "serve.json"), patience=0.0)
        engine = config.build(None, PolicyVersion(run="x"), SystemClock(), NullSink())
        await engine.start()
        try:
            await engine.pause()
            task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=9), request="x"))
            while (await engine.health()).waiting == 0:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
            process.kill()
            process.wait()
            with pytest.raises(EngineClosed) as found:
                await task
            assert found.value.__cause__ is not None or "went away" in str(found.value)
            for call in (
                engine.generate(PROMPT, Sampling(), request="y"),
                engine.score(PROMPT),
                engine.pause(),
                engine.resume(),
                engine.health(),
            ):
                with pytest.raises(EngineClosed):
                    await call
        finally:
            await engine.close()


async def test_a_stopped_server_that_says_nothing_counts_as_hung(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        config = RemoteConfig(address=str(tmp_path / "serve.json"), silence=1.0)
        engine = config.build(None, PolicyVersion(run="x"), SystemClock(), NullSink())
        await engine.start()
        try:
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(Exception, match=r"hangs|did not finish"):
                await engine.generate(PROMPT, Sampling(), request="x")
        finally:
            process.send_signal(signal.SIGCONT)
            await engine.close()


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused(tmp_path, "--fresh", "fresh.toml", "--port", port)
    assert f"127.0.0.1:{port}" in said and "--port" in said


def test_others_reach_it_only_with_tokens_from_the_environment(tmp_path: Path) -> None:
    said = refused(tmp_path, "--fresh", "fresh.toml", "--host", "0.0.0.0")
    assert "ROLLWRIGHT_TOKEN" in said
    said = refused(tmp_path, "--fresh", "fresh.toml", ROLLWRIGHT_TOKEN="short")
    assert "token" in said and "short" not in said
    same = "the-same-token-for-both"
    said = refused(tmp_path, "--fresh", "fresh.toml", ROLLWRIGHT_TOKEN=same, ROLLWRIGHT_CONTROL_TOKEN=same)
    assert "token of its own" in said and same not in said
    with serving(tmp_path, "--host", "0.0.0.0", ROLLWRIGHT_TOKEN="a-token-of-the-environment"):
        address, _ = read(tmp_path / "serve.json")
        assert "127.0.0.1" in address.control_url and "0.0.0.0" in address.url
        headers = {"authorization": "Bearer a-token-of-the-environment"}
        url = address.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/health", headers=headers, trust_env=False).status_code == 200


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    assert "either" in refused(tmp_path)
    assert "no such file" in refused(tmp_path, "--fresh", "nowhere.toml")
    assert str(tmp_path / "nothing") in refused(tmp_path, str(tmp_path / "nothing"))
