"""`rollwright train`: from a configuration to a trained policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    configs: Annotated[list[Path], typer.Argument(help="TOML file, then overlays.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, for example loop.steps=20.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="coupled or async, short for --set mode=….")] = None,
    unsafe_sandbox: Annotated[
        bool,
        typer.Option("--unsafe-sandbox", help="Run tools without isolation where the kernel offers none."),
    ] = False,
) -> None:
    """Train an agent: warm start, evaluation, reinforcement learning, evaluation."""
    from rich.console import Console

    from rollwright.config import load
    from rollwright.run.conductor import conduct

    sets = list(overrides or [])
    if mode:
        sets.append(f'mode="{mode}"')
    if unsafe_sandbox:
        sets.append("sandbox.unsafe=true")
    code = conduct(load(configs, sets), Console())
    raise typer.Exit(code)
