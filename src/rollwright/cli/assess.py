"""`rollwright assess`: is a task set worth training on with this policy?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer


def assess(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(help="TOML file, then overlays; those of the run with --run.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override one key, for example tasks.hops=2.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run folder whose newest checkpoint is the policy; else a fresh one.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Train tasks to try.")] = 64,
    tries: Annotated[int, typer.Option(min=2, help="Rollouts of each task.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
    unsafe_sandbox: Annotated[
        bool,
        typer.Option("--unsafe-sandbox", help="Run tools without isolation where the kernel offers none."),
    ] = False,
) -> None:
    """Try train tasks before training: is there something to learn, a signal to learn it from, at what cost?
    The scripted runs are played first; tasks that are wrong themselves are refused. Exit code 0 for "go", 1
    otherwise."""
    from rollwright.clock import SystemClock
    from rollwright.config import load, override
    from rollwright.errors import ConfigError
    from rollwright.evals.feasibility_text import lines
    from rollwright.run.folder import RunFolder

    if not configs and run is None:
        raise ConfigError("assess needs a TOML file, or --run with a run folder")
    sets = [*(overrides or []), *(["sandbox.unsafe=true"] if unsafe_sandbox else [])]
    folder = None if run is None else RunFolder(run)
    config = load(configs or [], sets) if configs or folder is None else override(folder.load(), sets)

    from rollwright.run.assess import assess as tried  # torch: after what can be wrong was found
    from rollwright.run.rehearse import Faulty
    from rollwright.run.stop import Stopped, stoppable

    def progress(text: str) -> None:
        typer.echo(text, err=True)

    try:
        with stoppable():
            found = tried(config, folder, tasks=tasks, tries=tries, progress=progress, clock=SystemClock())
    except Faulty as faulty:
        _refuse(faulty.reasons, as_json)
    except Stopped as stopped:
        typer.echo(f"rollwright: {stopped}: nothing is left behind; start again for an answer", err=True)
        raise typer.Exit(128 + stopped.number) from stopped
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        for line in lines(found):
            typer.echo(line)
    raise typer.Exit(0 if found.verdict == "go" else 1)


def _refuse(reasons: tuple[str, ...], as_json: bool) -> NoReturn:
    """Say what is wrong with the tasks themselves."""
    if as_json:
        typer.echo(json.dumps({"verdict": "faulty tasks", "reasons": reasons}, indent=1))
    else:
        typer.echo("faulty tasks: nothing was tried, because whatever a policy does, this is wrong:")
        for reason in reasons:
            typer.echo(f"  {reason}")
    raise typer.Exit(1)
