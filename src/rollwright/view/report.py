"""`report.html`: a run in one file that asks no network and trusts no text.

Role: sets the figures, charts and rollouts of a run into a page. Neighbours: `folder` reads the run;
`curves`, `facts`, `settings` and `rollouts` compute; `assets/` holds template, style and scripts. Invariants:
text of the run enters by autoescape here and by `textContent` there; the page's Content-Security-Policy names
the hashes of its own style and scripts and forbids everything else; the file is replaced whole.
"""

from __future__ import annotations

import base64
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rollwright.archive.base import Line
from rollwright.errors import ConfigError
from rollwright.run.folder import RunFolder
from rollwright.view import facts
from rollwright.view.curves import charts
from rollwright.view.folder import RunView, viewed
from rollwright.view.memory import caps, memory
from rollwright.view.rollouts import Packed, chosen, index, packed, squeezed
from rollwright.view.settings import settings

ROLLOUTS = 10_000
"""Rollouts embedded whole; the others are in the index only."""
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = ("uPlot.iife.min.js", "data.js", "charts.js", "tokens.js", "rollout.js", "table.js", "main.js")


@dataclass(frozen=True)
class Written:
    """The report's file, its size in bytes, and how many of the kept rollouts it holds whole."""

    path: Path
    size: int
    embedded: int
    rollouts: int


def write_report(folder: RunFolder, output: Path | None = None, rollouts: int = ROLLOUTS) -> Written:
    """Write the report of a run in whatever state it is to `output` (`report.html` of the folder).

    At most `rollouts` are embedded whole, in whole groups from the whole run.

    Raises:
        ConfigError: no run folder, or `output` cannot be written.
        StoreError, SchemaError: a database of the run cannot be read.
    """
    path = output or folder.report
    with viewed(folder) as view:
        bodies = packed(view, chosen(view, rollouts))
        page = render(view, bodies).encode("utf-8", "replace")
        found = Written(path, len(page), len(bodies.places), len(view.lines))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(page)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(
            f"{path}: the report cannot be written ({error.strerror}): give another file with --output"
        ) from error
    return found


def render(view: RunView, bodies: Packed) -> str:
    """The page."""
    styles, scripts = [_asset(name) for name in STYLES], [_asset(name) for name in SCRIPTS]
    data = {
        "overview": {
            "run": view.folder.id,
            "success": view.config.rollout.success if view.config else 1.0,
            "charts": charts(view),
            "tokens": [token.decode("latin-1") for token in view.tokens],
        },
        "index": index(view, bodies.places),
    }
    page: str = _template().render(
        policy=_policy(styles, scripts),
        styles=[Markup(style) for style in styles],  # our own files
        scripts=[Markup(script) for script in scripts],
        data={name: squeezed(value) for name, value in data.items()},
        chunks=bodies.chunks,
        embedded=len(bodies.places),
        **_facts(view, bodies),
    )
    return page


def _facts(view: RunView, bodies: Packed) -> dict[str, Any]:
    """What the template says in words."""
    examples = [_example(view, name, line) for name, line in facts.examples(view)]
    return {
        "run": view.folder.id,
        "state": view.state,
        "problem": view.problem,
        "fatal": facts.fatal(view),
        "header": facts.header(view),
        "versions": facts.versions(view),
        "measured": facts.measured(view),
        "further": facts.further(view),
        "outcomes": facts.outcomes(view),
        "dispositions": facts.dispositions(view),
        "has_ledger": view.ledger is not None,
        "fates": facts.fates(view),
        "calls": facts.calls(bodies.calls),
        "notes": facts.notes(view),
        "memory": memory(view),
        "caps": caps(view),
        "total": len(view.lines),
        "unreadable": sorted(view.archive.unreadable) if view.archive else [],
        "settings": settings(view.config) if view.config else [],
        "examples": examples,
    }


def _example(view: RunView, name: str, line: Line) -> dict[str, Any]:
    """One rollout for the template: its records as they are."""
    kept = view.archive.kept(line.rollout) if view.archive else None
    return {"name": name, "line": line, "kept": kept}


def _policy(styles: list[str], scripts: list[str]) -> str:
    """Nothing but our own style and scripts, by hash; no network, no inline handlers."""
    allowed = {
        "default-src": ["'none'"],
        "script-src": [_hash(script) for script in scripts],
        "style-src": [_hash(style) for style in styles],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(f"{what} {' '.join(sources)}" for what, sources in allowed.items())


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def _asset(name: str) -> str:
    return files("rollwright.view").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": _percent, "short": _short}
    return environment.from_string(_asset("report.html.j2"))


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def _short(text: str, most: int = 600) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"
