"""Habits that a machine can count, counted at zero.

Nothing executes by being loaded, failures are attributed, configuration is read from typed fields, the
environment in one place, files and functions stay small.
"""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

SRC = Path(__file__).parents[2] / "src" / "rollwright"

UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
BROAD = {"Exception", "BaseException"}
FILE_LINES, FUNCTION_LINES = 450, 80


def is_name(node: ast.AST | None, dotted: str) -> bool:
    """Whether a node spells `a` or `a.b`."""
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == dotted


def has_keyword(call: ast.Call, name: str, value: object) -> bool:
    """Whether a call passes `name=value`, literally."""
    return any(each.arg == name and ast.unparse(each.value) == str(value) for each in call.keywords)


def is_broad(kind: ast.expr | None) -> bool:
    """Whether a handler of `kind` catches everything."""
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(is_name(each, name) or is_name(each, f"builtins.{name}") for each in kinds for name in BROAD)


def is_config(node: ast.expr) -> bool:
    """Whether a node is named like a configuration: `config`, `self.cfg`, `engine_config`."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.rpartition("_")[2] in {"config", "cfg"}


def in_call(path: str, call: ast.Call) -> Iterator[str]:
    """What is wrong with one call."""
    function = call.func
    if is_name(function, "torch.load") and not has_keyword(call, "weights_only", True):
        yield "torch.load without weights_only=True executes what it loads"
    if has_keyword(call, "allow_pickle", True):
        yield "allow_pickle=True executes what it loads"
    if is_name(function, "print") and not path.startswith("cli/"):
        yield "print outside cli/: emit an event"
    if isinstance(function, ast.Attribute) and function.attr == "get" and is_config(function.value):
        yield "configuration is read as a field, not by .get()"


def in_node(path: str, node: ast.AST, lines: list[str]) -> Iterator[str]:
    """What is wrong with one node of a module at `path`."""
    reads_environment = (
        path.startswith(("cli/", "sandbox/", "run/")) or PurePosixPath(path).name == "secrets.py"
    )
    match node:
        case ast.Import(names=names):
            yield from (
                f"{n.name} executes what it loads" for n in names if n.name.partition(".")[0] in UNSAFE
            )
        case ast.ImportFrom(module=str(module), names=names):
            if module.partition(".")[0] in UNSAFE:
                yield f"{module} executes what it loads"
            if module == "torch" and any(n.name == "load" for n in names):
                yield "torch.load by another name hides from this test"
            if module == "os" and not reads_environment and {n.name for n in names} & {"environ", "getenv"}:
                yield "the environment is read in cli/, run/, sandbox/ and secrets.py only"
        case ast.Attribute() if is_name(node, "os.environ") or is_name(node, "os.getenv"):
            if not reads_environment:
                yield "the environment is read in cli/, run/, sandbox/ and secrets.py only"
        case ast.List(elts=[program, *options]) if "sys.executable" in ast.unparse(program):
            if not {"-P", "-I"} & {o.value for o in options if isinstance(o, ast.Constant)}:
                yield "an interpreter without -P or -I imports what lies in the working directory"
        case ast.ExceptHandler(type=None):
            yield "bare except"
        case ast.ExceptHandler(type=kind) if is_broad(kind):
            if "# boundary:" not in lines[node.lineno - 1]:
                yield "broad except without its reason: `# boundary: why everything is caught here`"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION_LINES:
                yield f"{node.name} has {size} lines, more than {FUNCTION_LINES}"
        case ast.Call():
            yield from in_call(path, node)


def violations(path: str, source: str) -> list[str]:
    """What a module at `path` (relative to the package) breaks."""
    tree, lines = ast.parse(source), source.splitlines()
    nodes = ((node, what) for node in ast.walk(tree) for what in in_node(path, node, lines))
    found = [f"{path}:{getattr(node, 'lineno', 1)}: {what}" for node, what in nodes]
    if not ast.get_docstring(tree):
        found.append(f"{path}:1: no module docstring")
    if len(lines) > FILE_LINES:
        found.append(f"{path}:1: {len(lines)} lines, more than {FILE_LINES}: does it hold two nouns?")
    return found


def test_the_source_keeps_the_rules() -> None:
    tree = {path.relative_to(SRC).as_posix(): path.read_text() for path in sorted(SRC.rglob("*.py"))}
    assert tree, f"no source under {SRC}"
    found = [line for path, source in tree.items() for line in violations(path, source)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("buffer/ring.py", "import pickle", "executes what it loads"),
        ("buffer/ring.py", "def f():\n    from dill import loads", "executes what it loads"),
        ("buffer/ring.py", "np.load(f, allow_pickle=True)", "executes what it loads"),
        ("trainer/checkpoint.py", "torch.load(path)", "weights_only"),
        ("trainer/checkpoint.py", "torch.load(path, weights_only=False)", "weights_only"),
        ("trainer/checkpoint.py", "from torch import load", "another name"),
        ("trainer/step.py", "print('x')", "print"),
        ("trainer/step.py", "try:\n    f()\nexcept:\n    pass", "bare except"),
        ("trainer/step.py", "try:\n    f()\nexcept Exception:\n    pass", "broad except"),
        (
            "trainer/step.py",
            "try:\n    f()\nexcept (OSError, BaseException):  # why\n    pass",
            "broad except",
        ),
        ("run/step.py", "Popen([sys.executable, '-m', 'rollwright'])", "-P or -I"),
        ("run/step.py", "Popen([realpath(sys.executable), *more])", "-P or -I"),
        ("trainer/step.py", "config.get('x')", ".get()"),
        ("trainer/step.py", "self.run_cfg.get('x', 1)", ".get()"),
        ("trainer/step.py", "def f():\n" + "    x = 1\n" * 80, "81 lines"),
        ("trainer/step.py", "x = 1\n" * 450, "451 lines"),
        ("trainer/step.py", "import os\nx = os.environ['HOME']", "environment"),
        ("trainer/step.py", "import os\nx = os.getenv('HOME')", "environment"),
        ("trainer/step.py", "from os import environ", "environment"),
    ],
)
def test_a_violation_is_reported(path: str, body: str, what: str) -> None:
    assert [what in line for line in violations(path, f'"""Role."""\n{body}')] == [True]


@pytest.mark.parametrize("source", ["", "import json", "# a comment"])
def test_a_missing_docstring_is_reported(source: str) -> None:
    assert violations("types.py", source) == ["types.py:1: no module docstring"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("trainer/checkpoint.py", "torch.load(path, weights_only=True)"),
        ("cli/train.py", "import os\nprint(os.environ['HOME'])"),
        ("engine/secrets.py", "import os\nos.environ['KEY']"),
        ("sandbox/local.py", "import os\nenvironment = {'PATH': os.environ['PATH']}"),
        ("trainer/step.py", "try:\n    f()\nexcept Exception as e:  # boundary: a plug-in's code\n    pass"),
        ("trainer/step.py", "try:\n    f()\nexcept OSError:\n    pass"),
        ("trainer/step.py", "metrics.get('x')\nconfigure.get('y')"),
        ("trainer/step.py", "def f():\n" + "    x = 1\n" * 79),
        ("trainer/step.py", "x = 1\n" * 449),
    ],
)
def test_what_the_rules_allow_passes(path: str, body: str) -> None:
    assert violations(path, f'"""Role."""\n{body}') == []
