"""The command `rollwright`.

Role: gathers the commands. Neighbours: one file per command beside this one. Invariants: a foreseeable
failure is one line on standard error and an exit code other than 0, never a traceback; `--help` imports no
torch. The console script is `entry`.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rollwright import __version__
from rollwright.errors import RollwrightError
from rollwright.monitor.plain import clean

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""


class Commands(TyperGroup):
    """Turns errors of our own tree, and Ctrl-C, into one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RollwrightError as error:
            typer.echo(f"rollwright: {clean(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:  # a command that has something to end catches it before
            typer.echo("rollwright: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train LLM agents by reinforcement learning on the work they do.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    return


def _register() -> None:
    from rollwright.cli import assess, configuration, doctor, evaluate, plan, report, serve, trace, train

    app.command("train")(train.train)
    app.command("assess")(assess.assess)
    app.command("eval")(evaluate.evaluate)
    app.command("serve")(serve.serve)
    app.command("report")(report.report)
    app.command("trace")(trace.trace)
    app.command("config")(configuration.configuration)
    app.command("doctor")(doctor.doctor)
    app.add_typer(plan.plan, name="plan")


_register()

if __name__ == "__main__":
    app()
