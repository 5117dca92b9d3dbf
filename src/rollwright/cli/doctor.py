"""`rollwright doctor`: what this machine can do, what is missing, how to get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollwright.run.doctor import Examination

MARKS = {"ok": "✓", "limited": "~", "absent": "·", "bad": "✗"}


def doctor(
    folder: Annotated[Path, typer.Option(help="Folder where runs would be kept.")] = Path("runs"),
    reap: Annotated[
        bool, typer.Option("--reap", help="First remove what killed runs left: processes, mounts, folders.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Say what this machine can do and what is missing; exit code 0 if training can start here, else 1."""
    from rollwright.run.doctor import examine

    found = examine(folder, reap=reap)
    if as_json:
        typer.echo(json.dumps(found.tree(), indent=1, ensure_ascii=False))
    else:
        _show(found)
    raise typer.Exit(0 if found.ready else 1)


def _show(found: Examination) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rollwright.run.doctor import label

    console = Console()
    if not console.is_terminal:  # one finding a line, nothing wrapped
        for section, findings in found.sections.items():
            for each in findings:
                more = f"; {each.mend}" if each.mend else ""
                typer.echo(f"{MARKS[each.state.value]} {label(section, each)}: {each.value}{more}")
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "", "found", "what to know or do"):
            table.add_column(column, overflow="fold")
        for section, findings in found.sections.items():
            for each in findings:
                row = (
                    MARKS[each.state.value],
                    label(section, each).replace(": ", " ", 1),
                    each.value,
                    each.mend,
                )
                table.add_row(*map(Text, row))
            table.add_section()
        console.print(table)
    typer.echo("training can start here" if found.ready else "training cannot start here:")
    for reason in found.reasons:
        typer.echo(f"  {reason}")
