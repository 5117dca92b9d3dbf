"""`rollwright config`: what would run, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def configuration(
    configs: Annotated[
        list[Path] | None, typer.Argument(help="TOML file, then overlays.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, for example loop.steps=20.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Print the resolved configuration as TOML, and what follows from it; refuse what `train` refuses."""
    from rollwright.config import load
    from rollwright.run.preflight import check
    from rollwright.run.written import differing, toml

    config = load(configs or [], overrides or [])
    derived = check(config)
    if as_json:
        tree = differing(config) if changed else config.model_dump(mode="json")
        typer.echo(json.dumps({"config": tree, "derived": derived.tree()}, indent=1))
        return
    typer.echo(toml(config, changed=changed))
    for line in derived.lines():
        typer.echo(f"# {line}")
