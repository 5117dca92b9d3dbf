"""Prometheus reads the engine of a run while it runs."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest
from in_process import TINY, run
from prometheus_client.parser import text_string_to_metric_families

from rollwright.config import load
from rollwright.engine.serve.scrape import free
from rollwright.errors import ConfigError
from rollwright.events import Noted, read_events
from rollwright.run.begin import begin


async def test_the_engine_of_a_run_is_scraped_while_it_works(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    sampled, running = [0.0], asyncio.create_task(run(tmp_path, f"loop.metrics_port={port}"))
    async with httpx.AsyncClient(trust_env=False) as client:
        while not running.done():
            await asyncio.sleep(0.01)
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/metrics")
            except httpx.TransportError:  # not yet, or no longer
                continue
            assert answer.status_code == 200
            figures = {
                s.name: s.value for f in text_string_to_metric_families(answer.text) for s in f.samples
            }
            sampled.append(figures["rollwright_engine_sampled_tokens_total"])
    folder = await running
    told = [each.event for each in read_events(folder.path)]
    assert any(
        isinstance(event, Noted) and event.text.startswith("chat template: append-only") for event in told
    )
    assert sampled == sorted(sampled) and sampled[-1] > 0
    free(port)


def test_a_port_that_is_taken_is_refused_before_the_run(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"loop\.metrics_port = {port}"):
            begin(load([], [*TINY, f"folder={tmp_path}", f"loop.metrics_port={port}"]))
    assert not list(tmp_path.iterdir())
