"""What a machine may lack: a test says so with `@pytest.mark.needs("chromium")`.

Where it is missing the test is skipped, and the last lines of the run name what was not tested. The
environment variable ROLLWRIGHT_REQUIRE (names with commas) makes a missing one a failure: CI sets it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from opened import OPENED


def chromium() -> str | None:
    """Why no Chromium can be driven; None where one can."""
    if find_spec("playwright") is None:
        return "the package playwright is missing: pip install -e '.[dev]'"
    if browser() is None:
        return "no Chromium is installed: apt-get install chromium"
    return None


def browser() -> Path | None:
    """The first Chromium on the path."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((Path(found) for name in names if (found := shutil.which(name))), None)


def reasoning_gym() -> str | None:
    """Why its data sets can't be made."""
    if find_spec("reasoning_gym") is None:
        return "the package reasoning-gym is missing: pip install -e '.[reasoning-gym]'"
    return None


def transformers() -> str | None:
    """Why no Hugging Face model can be made."""
    if find_spec("transformers") is None:
        return "the package transformers is missing: pip install -e '.[hf]'"
    return None


NEEDS: dict[str, Callable[[], str | None]] = {
    "chromium": chromium,
    "reasoning-gym": reasoning_gym,
    "transformers": transformers,
}
"""Name → a function that says why it is missing."""

REQUIRED = {name.strip() for name in os.environ.get("ROLLWRIGHT_REQUIRE", "").split(",")} - {""}
SKIPPED = "Skipped: needs "


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(name): what the machine must have for this test")
    if unknown := REQUIRED - NEEDS.keys():
        raise pytest.UsageError(
            f"ROLLWRIGHT_REQUIRE names {', '.join(sorted(unknown))}; known: {', '.join(NEEDS)}"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            why = NEEDS[name]()
            if why and name in REQUIRED:
                pytest.fail(f"{name} is required here (ROLLWRIGHT_REQUIRE): {why}", pytrace=False)
            if why:
                pytest.skip(f"needs {name}: {why}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was left out, from the reports: they come from other processes where tests run in several."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = (str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple))
    lacking = Counter(text.partition(SKIPPED)[2] for text in reasons if SKIPPED in text)
    for text, count in lacking.items():
        terminalreporter.write_line(f"NOT TESTED ({count} skipped), {text}", yellow=True)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what `until_end` was given."""
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture(scope="session")
def chromium_path() -> Path:
    """The Chromium of a test that needs one."""
    path = browser()
    assert path is not None
    return path
