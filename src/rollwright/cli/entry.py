"""What the console script `rollwright` calls.

Role: outermost, so that Ctrl-C while modules are still being imported is no traceback. Neighbours: `main`
has the command itself, and says the same of a Ctrl-C within it. Invariant: nothing is imported before
`entry` is entered.
"""


def entry() -> None:
    """Run the command; Ctrl-C at any time ends it with 130 and one line at most."""
    try:
        from rollwright.cli.main import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
