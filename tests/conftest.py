"""What a machine may lack: a test says so with `@pytest.mark.needs("chromium")`, and a module that makes
its subjects when it is imported with `needed("tokenizers", module=True)` below its imports.

Where it is missing the test is skipped, and the last lines of the run name what was not tested. The
environment variable ROLLWRIGHT_REQUIRE (names with commas) makes a missing one a failure: CI sets it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import NEEDS, REQUIRED, browser, needed
from opened import OPENED

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
            needed(name)


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
