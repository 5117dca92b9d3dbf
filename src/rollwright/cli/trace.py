"""`rollwright trace`: from any id of a run to everything connected with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    id: Annotated[
        str,
        typer.Argument(
            help="A rollout, call, sample, group, task, version, or the digest of a checkpoint, weights or "
            "a trace.",
            show_default=False,
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder; the newest below --folder by default.", show_default=False),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where run folders are.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with nothing left out.")] = False,
) -> None:
    """Show what an id of a run is connected with: from a training sample, a call or a rollout to the
    checkpoint that learnt from it, and back."""
    from rollwright.run.folder import RunFolder, newest
    from rollwright.view.trace import Tracer

    with Tracer(RunFolder(run) if run else newest(folder)) as tracer:
        found = tracer.trace(id)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(found).decode())
        return
    from rich.console import Console

    from rollwright.view.trace_text import tree

    console = Console()
    if not console.is_terminal:  # a pipe: nothing is wrapped or cut
        console.width = 100_000
    console.print(tree(found), soft_wrap=True)
