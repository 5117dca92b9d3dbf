"""`rollwright eval`: success of a run's newest checkpoint on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, for example runs/records-1.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, for example evaluation.tasks=512.")
    ] = None,
) -> None:
    """Evaluate the newest checkpoint of a run, sampled and greedy."""
    from rich.console import Console

    from rollwright.run.conductor import evaluate_run

    raise typer.Exit(evaluate_run(run, list(overrides or []), Console()))
