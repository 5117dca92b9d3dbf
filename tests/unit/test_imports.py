"""Who may import whom, and where torch may load.

The layout is a set of packages that know the shared leaves, each other's `base` and nothing else; one package
(`run`) knows them all and only the command line knows it. Read from the source with `ast`.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src" / "rollwright"

LEAVES = {"types", "errors", "events", "plugins", "clock", "wire", "values", "database"}
PACKAGES = {
    *("tasks", "model", "engine", "tools", "sandbox", "guard", "agents", "rollout", "reward", "buffer"),
    *("archive", "view"),
    *("algo", "trainer", "weights", "blobs", "pool", "evals", "monitor", "testing", "cli", "dashboard"),
}
USES_MODEL = {"engine", "trainer", "evals", "weights"}
HEAVY = {"torch", "transformers", "peft", "trl", "vllm", "sglang"}  # each of them loads torch


class Import(NamedTuple):
    """One imported name: `from rollwright.engine import base` is `rollwright.engine.base`."""

    target: str
    line: int
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING:`, so never executed

    @property
    def eager(self) -> bool:
        """Whether it happens when the module is loaded."""
        return not (self.lazy or self.typing)


def imports(path: str, source: str) -> Iterator[Import]:
    """Every import of a module at `path` (relative to the package), however deep; relative ones resolved."""
    package = ["rollwright", *PurePosixPath(path).parent.parts]

    def targets(node: ast.AST) -> list[str]:
        match node:
            case ast.Import(names=names):
                return [each.name for each in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                start = [
                    *(package[: len(package) - level + 1] if level else []),
                    *([module] if module else []),
                ]
                return [".".join([*start, each.name]) for each in names]
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]
            ):
                return [name] if called in {"import_module", "__import__"} else []
        return []

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        yield from (Import(target, getattr(node, "lineno", 1), lazy, typing) for target in targets(node))
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                lazy = True
            case ast.If(
                test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=orelse
            ):
                for child in node.body:
                    yield from walk(child, lazy, True)
                for child in orelse:
                    yield from walk(child, lazy, typing)
                return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy, typing)

    return walk(ast.parse(source), False, False)


def unit(path: str) -> str:
    """The top-level part that a path belongs to: `engine/kv.py` → `engine`, `run_ray.py` → `run`."""
    top = PurePosixPath(path).parts[0].removesuffix(".py")
    return "run" if top == "run" or top.startswith("run_") else top


def never_torch(path: str) -> bool:
    """Whether a module may not import torch even lazily: what flows, the protocols, the configuration."""
    return unit(path) in LEAVES | {"config"} or PurePosixPath(path).name in {"base.py", "config.py"}


def may_load_torch(path: str) -> bool:
    """Whether a module may import torch when it is loaded: implementations that compute, the conductor."""
    computes = unit(path) in {"model", "trainer", "weights", "run"} or path.startswith("engine/embedded")
    return computes and not never_torch(path)


def allowed(path: str, found: Import) -> bool:
    """Whether the module at `path` may import what it does of `rollwright`."""
    me, is_config = unit(path), PurePosixPath(path).name == "config.py"
    _, other, *rest = [*found.target.split("."), "", ""]
    other, part = ("run" if other == "run" or other.startswith("run_") else other), rest[0]
    if other in LEAVES or other == "__version__" or me == "run":
        return True
    if me in LEAVES or me == "__init__":
        return False
    if me == "config":
        return part == "config"
    if me in {"cli", "__main__"}:
        return other in PACKAGES | {"run", "config"}
    if me == "view":  # reads run folders: never starts anything
        return other in PACKAGES | {"config"} or (other, part) == ("run", "folder")
    if other == me:
        return found.lazy or part == "base" or not is_config
    if other in PACKAGES and "base" in rest[:2]:  # a seam inside a package too: `engine.grammar.base`
        return True
    if me == "testing":
        return found.lazy and other in PACKAGES | {"run", "config"}
    return other == "model" and me in USES_MODEL and not is_config


def violations(path: str, source: str) -> list[str]:
    """What a module's own imports break."""
    if unit(path) not in LEAVES | PACKAGES | {"config", "run", "__init__", "__main__"}:
        return [f"{path}:1: no such part in the layout; add it to this test and to the layout, or move it"]
    found = []
    for each in imports(path, source):
        top = each.target.partition(".")[0]
        if top == "rollwright" and not allowed(path, each):
            found.append(f"{path}:{each.line}: {unit(path)} may not import {each.target} here")
        if top in HEAVY and not each.typing and never_torch(path):
            found.append(f"{path}:{each.line}: {each.target} loads torch; this module does without it")
        elif top in HEAVY and each.eager and not may_load_torch(path):
            found.append(
                f"{path}:{each.line}: {each.target} loads torch; import it in the function that needs it"
            )
    return found


def torch_leaks(tree: Mapping[str, str]) -> list[str]:
    """Chains of module-level imports by which a module that must be free of torch loads it all the same."""

    def files(target: str) -> list[str]:
        parts = target.split(".")[1:]
        names = ["__init__.py"]
        for end in range(1, len(parts) + 1):
            names += ["/".join(parts[:end]) + ".py", "/".join([*parts[:end], "__init__.py"])]
        return [name for name in names if name in tree]

    loads: dict[str, list[str]] = {}
    for path, source in tree.items():
        eager = [each.target for each in imports(path, source) if each.eager]
        heavy = [target for target in eager if target.partition(".")[0] in HEAVY]
        ours = [name for target in eager if target.startswith("rollwright.") for name in files(target)]
        loads[path] = heavy + ours

    def chain(path: str, seen: set[str]) -> list[str]:
        if path not in loads:
            return [path]
        seen.add(path)
        for name in loads[path]:
            if name not in seen and (rest := chain(name, seen)):
                return [path, *rest]
        return []

    found = (chain(path, set()) for path in tree if not may_load_torch(path))
    return [" → ".join(each) for each in found if each]


def test_every_import_is_allowed() -> None:
    tree = {path.relative_to(SRC).as_posix(): path.read_text() for path in sorted(SRC.rglob("*.py"))}
    assert tree, f"no source under {SRC}"
    found = [line for path, source in tree.items() for line in violations(path, source)] + torch_leaks(tree)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rollout/factory.py", "from rollwright.trainer.step import Step"),
        ("rollout/factory.py", "from rollwright import trainer"),
        ("rollout/factory.py", "from rollwright.engine import Engine"),  # not through `base`
        ("rollout/factory.py", "from rollwright.model import decoder"),
        ("rollout/factory.py", "from rollwright.config import RunConfig"),
        ("rollout/factory.py", "import rollwright"),
        ("rollout/factory.py", "from ..trainer import step"),
        (
            "rollout/factory.py",
            "def f():\n    from rollwright.trainer.step import Step",
        ),  # lazily is no excuse
        ("rollout/factory.py", "import importlib\nimportlib.import_module('rollwright.trainer.step')"),
        ("rollout/factory.py", "if TYPE_CHECKING:\n    import rollwright.pool.local"),
        ("engine/embedded.py", "from rollwright.run import conduct"),
        ("dashboard/server.py", "def f():\n    from rollwright.run import conduct"),
        ("view/report.py", "from rollwright.run.conductor import conduct"),
        ("engine/config.py", "from rollwright.engine.embedded import Embedded"),  # must be lazy
        ("engine/config.py", "def build():\n    from rollwright.model import decoder"),
        ("types.py", "from rollwright.engine.base import Engine"),
        ("config.py", "from rollwright.engine.base import Engine"),
        ("testing/fakes.py", "from rollwright.engine.embedded import Embedded"),
        ("testing/fakes.py", "from rollwright.engine.embedded.radix import base"),
        ("extra/thing.py", "import json"),
        ("types.py", "import torch"),
        ("events.py", "from torch import Tensor"),
        ("engine/base.py", "import torch"),
        ("trainer/config.py", "import torch.nn"),
        ("engine/config.py", "def build():\n    import torch"),
        ("engine/vllm.py", "import vllm"),
        ("algo/grpo.py", "class A:\n    import torch"),  # a class body is executed
        ("cli/main.py", "try:\n    import torch\nexcept ImportError:\n    pass"),
    ],
)
def test_a_violation_is_reported(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "rollout/factory.py",
            "from rollwright.types import Rollout\nfrom rollwright.engine.base import Engine",
        ),
        ("rollout/factory.py", "from rollwright.rollout.groups import x"),
        ("rollout/factory.py", "from . import groups\nfrom ..engine import base"),
        ("testing/grammars.py", "from rollwright.engine.grammar.base import Grammars"),
        ("trainer/step.py", "import torch\nfrom rollwright.model.decoder import Decoder"),
        ("engine/embedded/scheduler.py", "import torch\nfrom rollwright.model import decoder"),
        ("engine/vllm.py", "def f():\n    import vllm"),
        ("engine/base.py", "if TYPE_CHECKING:\n    import torch"),
        ("engine/config.py", "def build():\n    from rollwright.engine.embedded import Embedded"),
        (
            "config.py",
            "from rollwright.engine.config import EngineConfig\nfrom rollwright.algo import config",
        ),
        ("run.py", "import torch\nfrom rollwright.trainer.step import Step"),
        ("run/worker.py", "from rollwright.trainer.step import Step\nfrom rollwright.run import ledger"),
        ("run_ray.py", "from rollwright.pool.ray import Pool"),
        ("cli/train.py", "from rollwright.config import RunConfig\nfrom rollwright.run import conduct"),
        ("testing/fakes.py", "def f():\n    import rollwright.run\n    import rollwright.engine.embedded"),
    ],
)
def test_what_the_layout_allows_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_torch_is_found_at_the_end_of_a_chain() -> None:
    tree = {
        "__init__.py": "",
        "cli/main.py": "from rollwright.run.conductor import conduct",
        "cli/lazy.py": "def f():\n    from rollwright.run.conductor import conduct",
        "run/__init__.py": "from . import worker",
        "run/worker.py": "from rollwright.trainer.step import Step",
        "run/conductor.py": "",
        "trainer/step.py": "import torch",
    }
    assert torch_leaks(tree) == ["cli/main.py → run/__init__.py → run/worker.py → trainer/step.py → torch"]
