"""`rollwright serve`: a policy behind HTTP."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollwright.engine.serve.server import Keys, Ports, Server
    from rollwright.run.serving import Policy


def serve(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run folder, or a Hugging Face model's.", show_default=False),
    ] = None,
    fresh: Annotated[
        Path | None,
        typer.Option(help="TOML file: serve a model of it with random weights.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key of --fresh, for example seed=1.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of the public port; beyond loopback only with tokens from the environment.",
            show_default="127.0.0.1",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Public port; 0 is a free one.")] = 8000,
    control_host: Annotated[
        str | None, typer.Option(help="Address of the control port.", show_default="127.0.0.1")
    ] = None,
    control_port: Annotated[int, typer.Option(min=0, max=65535, help="Control port; 0 is a free one.")] = 0,
    address: Annotated[
        Path | None,
        typer.Option(
            help="File for URLs and tokens, readable by you only; clients read it.",
            show_default="serve.json in that folder, or here with --fresh",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder that new weights come through.", show_default="that of the run"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where it computes: cpu, cuda, cuda:1, mps.", show_default="that of the run, or cpu"
        ),
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests under way get at the end.")
    ] = 10.0,
) -> None:
    """Serve the newest checkpoint of a run, or a model: tokens, text, scores, metrics; weights and pause
    on a port of their own. Ctrl-C lets what is under way end, then stops; a second one stops at once."""
    from rollwright.engine.serve.server import LOOPBACK, Ports, free
    from rollwright.errors import ConfigError

    if (run is None) == (fresh is None):
        raise ConfigError("serve takes either a run folder or --fresh with a TOML file")
    keys = _keys(host, control_host)
    ports = Ports(
        host=host or LOOPBACK,
        port=port,
        control_host=control_host or LOOPBACK,
        control_port=control_port,
    )
    free(ports)
    policy = _policy(run, fresh, list(overrides or []), device)
    where = address or (run or Path()) / "serve.json"
    raise typer.Exit(asyncio.run(_serve(policy, keys, ports, where, weights or policy.weights, drain)))


def _keys(host: str | None, control_host: str | None) -> Keys:
    """Tokens of the environment, else fresh ones.

    Raises:
        ConfigError: an address that others can reach, without tokens that they could know.
    """
    from rollwright.engine.remote import secrets
    from rollwright.engine.serve.auth import Token
    from rollwright.engine.serve.server import Keys, loopback
    from rollwright.errors import ConfigError

    public, control = secrets.token(), secrets.control_token()
    for flag, given, token, name in (
        ("--host", host, public, secrets.PUBLIC),
        ("--control-host", control_host, control, secrets.CONTROL),
    ):
        if given is not None and not loopback(given) and not token:
            raise ConfigError(f"{flag} {given} is reached from other machines: set {name} to a token first")
    return Keys(
        public=Token(public) if public else Token.fresh(),
        control=Token(control) if control else Token.fresh(),
    )


def _policy(run: Path | None, fresh: Path | None, overrides: list[str], device: str | None) -> Policy:
    from importlib.util import find_spec

    from rollwright.clock import SystemClock
    from rollwright.config import load
    from rollwright.errors import ConfigError, MissingExtra
    from rollwright.events import NullSink
    from rollwright.run import serving
    from rollwright.run.folder import RunFolder

    for package, extra in (("torch", "torch"), ("uvicorn", "serve")):
        if find_spec(package) is None:
            raise MissingExtra("serving a policy", extra)
    if fresh is not None:
        return serving.fresh(load([fresh], overrides), SystemClock(), NullSink(), device)
    if overrides:
        raise ConfigError("--set goes with --fresh: a run is served as it was configured")
    assert run is not None
    if serving.is_model(run):
        return serving.of_folder(run, SystemClock(), NullSink(), device)
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ConfigError(
            f"{run}: nothing to serve: expected a run folder, or a Hugging Face model's (config.json, "
            "tokenizer.json, safetensors); rollwright serve --fresh takes a TOML file"
        )
    return serving.of_run(folder, SystemClock(), NullSink(), device)


async def _serve(
    policy: Policy, keys: Keys, ports: Ports, where: Path, weights: Path | None, drain: float
) -> int:
    """Serve until a signal; the exit code."""
    from rollwright.clock import SystemClock
    from rollwright.engine.remote.address import Address, write
    from rollwright.engine.serve.server import Server
    from rollwright.engine.serve.weights import WeightsFolder
    from rollwright.events import NullSink

    loop, asked, again = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def ask() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)
    server = Server(
        policy.engine,
        keys,
        SystemClock(),
        NullSink(),
        name=policy.text.name,
        text=policy.text,
        weights=None if weights is None else WeightsFolder(weights),
    )
    await server.start(ports)
    try:
        told = Address(
            url=server.url,
            token=keys.public.reveal(),
            control_url=server.control_url,
            control_token=keys.control.reveal(),
        )
        write(where, told, weights)
        typer.echo(f"serving {policy.version} of {policy.version.run} at {server.url}")
        typer.echo(f"control at {server.control_url}; tokens in {where}")
        await asked.wait()
        typer.echo("stopping: what is under way may end; again to stop at once", err=True)
    finally:
        where.unlink(missing_ok=True)
        await _stopped(server, drain, again)
    return 0


async def _stopped(server: Server, drain: float, again: asyncio.Event) -> None:
    """Drain, unless asked again."""
    draining, hurried = asyncio.create_task(server.drained(drain)), asyncio.create_task(again.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurried):
        task.cancel()
    await asyncio.gather(draining, hurried, return_exceptions=True)
    await server.stop(0.0)
