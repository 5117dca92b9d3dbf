"""`rollwright report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run folder, for example runs/records-1.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option(help="File to write; report.html of the run folder by default.")
    ] = None,
    rollouts: Annotated[
        int, typer.Option(min=0, help="Rollouts embedded whole at most; the others are listed only.")
    ] = 10_000,
) -> None:
    """Write report.html: curves, outcomes, every rollout with its tokens; no network needed to read it."""
    from rollwright.run.folder import RunFolder
    from rollwright.view.report import write_report

    written = write_report(RunFolder(run), output, rollouts)
    whole = f"{written.embedded:,} of {written.rollouts:,} rollouts"
    typer.echo(f"{written.path} ({written.size / 1e6:.1f} MB, {whole})")
