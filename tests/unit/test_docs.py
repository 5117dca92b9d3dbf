"""The documentation tells the truth: marked snippets run, links lead somewhere, what is named exists.

A fenced block with `<!-- test: run -->` on the line before is executed: `python` and `bash` as a script that
stops at the first failure, `console` as its `$ ` lines. The snippets of one file run in order in one scratch
folder that has the repository's examples, so that a later one may use what an earlier one made.
The configuration reference is the one that the code gives.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MARK = "<!-- test: run -->"
BLOCK = re.compile(r"\n```(python|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("docs", "examples", "benchmarks")
LINKS = [
    *sorted(ROOT.glob("*.md")),
    *(page for name in FOLDERS for page in sorted((ROOT / name).rglob("*.md"))),
]
SECONDS = 300


class Snippet(NamedTuple):
    """A marked block: where it begins, its language and its text."""

    line: int
    language: str
    text: str


def snippets(document: str) -> list[Snippet]:
    """The marked blocks of a document.

    Raises:
        ValueError: a mark has no closed python, bash or console block on the next line.
    """
    found = []
    for mark in re.finditer(rf"^{MARK}$", document, re.MULTILINE):
        line = document.count("\n", 0, mark.start()) + 1
        block = BLOCK.match(document, mark.end())
        if not block:
            raise ValueError(
                f"line {line}: a mark needs a closed python, bash or console block on the next line"
            )
        found.append(Snippet(line + 1, block[1], block[2]))
    return found


def command(snippet: Snippet) -> list[str]:
    """How a snippet is executed."""
    if snippet.language == "python":
        return [sys.executable, "-c", snippet.text]
    text = snippet.text
    if snippet.language == "console":
        commands = re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE)
        text = "\n".join(each.replace("\\\n> ", "\\\n") for each in commands)
    return ["bash", "-euo", "pipefail", "-c", text]


def execute(snippet: Snippet, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one snippet in a folder, with the environment's own commands first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command(snippet),
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def dead_links(document: str, folder: Path) -> list[str]:
    """Relative links of a document in `folder` that lead to no file."""
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", document, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(
        r"\]\(<?([^)\s>]+)|^\[[^\]]+\]:\s*(\S+)|\b(?:src|href)=\"([^\"]+)\"", prose, re.MULTILINE
    )
    local = (target for groups in targets for target in groups if target)
    paths = [t.partition("#")[0] for t in local if not re.match(r"[a-z][a-z0-9+.-]*:|//|#", t)]
    return [path for path in paths if not (folder / path).exists()]


def unknown(document: str) -> list[str]:
    """Tests, modules and pages named in code spans of a document that do not exist."""
    prose = re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)
    missing = []
    for path, test in re.findall(r"`((?:tests|src|benchmarks|docs|examples)/[\w./-]+)(?:::(\w+))?`", prose):
        file = ROOT / path
        if not file.exists() or (
            test and not re.search(rf"^(?:async )?def {test}\(", file.read_text(), re.M)
        ):
            missing.append(f"{path}::{test}" if test else path)
    return missing


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("page", RUNS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    if (ROOT / "examples").is_dir():
        shutil.copytree(
            ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
    for snippet in snippets(page.read_text()):
        done = execute(snippet, tmp_path)
        assert done.returncode == 0, f"{page.name}:{snippet.line} ended with {done.returncode}\n{done.stdout}"


def test_the_readme_has_snippets_that_run() -> None:
    assert snippets((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", LINKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize("page", LINKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_is_named_exists(page: Path) -> None:
    assert unknown(page.read_text()) == []


def test_the_requirements_name_modules_that_exist() -> None:
    table = (ROOT / "docs" / "requirements.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")] for row in table.splitlines() if row.startswith("| ")]
    named = [path for row in rows for path in re.findall(r"`([\w./]+)`", row[4])]
    assert len(named) > 30
    assert [path for path in named if not (ROOT / "src" / "rollwright" / path).exists()] == []


def test_the_configuration_reference_is_what_the_code_says() -> None:
    script = ROOT / "docs" / "make_configuration.py"
    made = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == made.stdout, "run: python docs/make_configuration.py > docs/configuration.md"


def test_only_marked_blocks_are_taken() -> None:
    console = "```console\n$ echo a \\\n> b\na b\n$ true\n```"
    document = f"```bash\nno\n```\n{MARK}\n{console}\n\n{MARK}\n```python\n1\n```\n"
    taken = snippets(document)
    assert [(each.line, each.language) for each in taken] == [(5, "console"), (13, "python")]
    assert command(taken[0])[-1] == "echo a \\\nb\ntrue"


@pytest.mark.parametrize("after", ["", "text", "```json\n{}\n```", "```bash\ntrue"])
def test_a_mark_without_its_block_is_refused(after: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        snippets(f"{MARK}\n{after}")


@pytest.mark.parametrize(
    ("language", "text", "code"),
    [("python", "raise SystemExit(3)", 3), ("bash", "false\ntrue", 1), ("console", "$ false\n$ true", 1)],
)
def test_a_failing_snippet_is_seen(language: str, text: str, code: int, tmp_path: Path) -> None:
    assert execute(Snippet(1, language, text), tmp_path).returncode == code


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "here.md").touch()
    text = "[a](here.md#x) [b](gone.md) ![c](gone.png) [d](https://x.org) [e](#top)\n[f]: lost.md\n"
    text += "`[g](h)`\n```\n[i](j)\n```\n"  # code is no link
    assert dead_links(text, tmp_path) == ["gone.md", "gone.png", "lost.md"]


def test_an_unknown_name_is_seen() -> None:
    here = "tests/unit/test_docs.py"
    text = f"`{here}::test_no_such` `{here}::unknown` `src/rollwright/x.py` `docs/`"
    assert unknown(text) == [f"{here}::test_no_such", "src/rollwright/x.py"]
