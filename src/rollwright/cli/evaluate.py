"""`rollwright eval`: success of a run's newest checkpoint on held-out tasks."""

from __future__ import annotations

from importlib.util import find_spec
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

    from rollwright.errors import MissingExtra
    from rollwright.run.conductor import evaluate_run
    from rollwright.run.folder import RunFolder
    from rollwright.run.preflight import evaluation

    sets = list(overrides or [])
    evaluation(RunFolder(run).load(), sets)  # before torch is imported, which takes seconds
    if find_spec("torch") is None:
        raise MissingExtra("an evaluation", "torch")
    raise typer.Exit(evaluate_run(run, sets, Console()))
