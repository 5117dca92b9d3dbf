"""`rollwright train`: from a configuration to a trained policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollwright.run.folder import RunFolder


def train(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="TOML file, then overlays.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with this run folder from its last checkpoint; takes no TOML file."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, for example loop.steps=20.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="coupled or async, short for --set mode=….")] = None,
    unsafe_sandbox: Annotated[
        bool,
        typer.Option("--unsafe-sandbox", help="Run tools without isolation where the kernel offers none."),
    ] = False,
) -> None:
    """Train an agent: warm start, evaluation, reinforcement learning, evaluation.

    Ctrl-C ends the present step and leaves a checkpoint; a second one stops at once. Either way --resume goes
    on."""
    from rich.console import Console

    from rollwright.config import load
    from rollwright.errors import ConfigError
    from rollwright.run import conductor

    sets = list(overrides or [])
    if mode:
        sets.append(f'mode="{mode}"')
    if unsafe_sandbox:
        sets.append("sandbox.unsafe=true")
    if resume is not None and configs:
        raise ConfigError(f"--resume {resume} goes on as that run was configured: leave out {configs[0]}")
    if resume is None and not configs:
        raise ConfigError(
            "nothing to train: give a TOML file, for example examples/records.toml, or --resume"
        )
    try:
        if resume is not None:
            ended = conductor.resume(resume, sets, Console())
        else:
            ended = conductor.conduct(load(configs or [], sets), Console())
    except conductor.WorkerFailed as error:
        _report(error.folder)
        raise
    _report(ended.folder)
    raise typer.Exit(ended.code)


def _report(folder: RunFolder) -> None:
    """Write the run's page; that it can't be is no failure of the run."""
    from rollwright.errors import RollwrightError
    from rollwright.monitor.plain import clean
    from rollwright.view.report import write_report

    try:
        typer.echo(f"report: {write_report(folder).path}")
    except RollwrightError as error:
        typer.echo(f"no report: {clean(' '.join(str(error).split()))}", err=True)
