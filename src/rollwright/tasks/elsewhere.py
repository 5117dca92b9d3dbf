"""The tasks of a configuration, drawn in another interpreter with another hash seed.

Role: shows whether a task is the same for ever, and not only in this process: sets of text, for one, are
iterated in another order there. Neighbours: the conformance suite and the rehearsal of `assess` ask.
Invariant: nothing but the configuration goes over, as JSON.

Run as `python -m rollwright.tasks.elsewhere` it reads a request from standard input and writes digests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from typing import Any

from rollwright.errors import ConfigError, RollwrightError
from rollwright.plugins import PartConfig
from rollwright.tasks.base import Split, TaskSet
from rollwright.wire import encode

HASH_SEEDS = ("1", "2")
"""The second one is for a process that has the first itself."""
MARK = "hash"
"""A text whose hash shows whether two processes have one hash seed."""
SECONDS = 120.0
SPLITS: tuple[Split, ...] = ("train", "heldout")


def digests(tasks: TaskSet, count: int) -> list[str]:
    """One digest for each of the first `count` tasks of each split, with its first demonstration."""
    made = []
    for split in SPLITS:
        for number in range(count):
            task = tasks.task(split, number)
            stored = encode((task, tasks.demonstrate(task, number)))
            made.append(hashlib.blake2b(stored, digest_size=8).hexdigest())
    return made


def movable(config: object) -> bool:
    """Whether another interpreter can build `config`: a class of a module, not of a function."""
    kind = type(config)
    return isinstance(config, PartConfig) and "<" not in kind.__qualname__ and kind.__module__ != "__main__"


def differing(config: PartConfig, count: int) -> list[str]:
    """Tasks (`train 3`) of a movable `config` that are other ones in an interpreter with another hash seed.

    Raises:
        ConfigError: as its `build`; or nothing could be drawn there, and the text says why.
    """
    kind = type(config)
    request = {
        "path": sys.path,
        "module": kind.__module__,
        "file": getattr(sys.modules.get(kind.__module__), "__file__", None),
        "name": kind.__qualname__,
        "config": config.model_dump(mode="json"),
        "count": count,
    }
    ours = digests(config.build(), count)  # type: ignore[attr-defined]
    theirs, mark = _drawn(json.dumps(request), HASH_SEEDS[0])
    if mark == hash(MARK):
        theirs, _ = _drawn(json.dumps(request), HASH_SEEDS[1])
    names = [f"{split} {number}" for split in SPLITS for number in range(count)]
    return [name for name, one, two in zip(names, ours, theirs, strict=True) if one != two]


def _drawn(request: str, seed: str) -> tuple[list[str], int]:
    """Digests, and the hash of `MARK` there."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rollwright.tasks.elsewhere"],
        input=request,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"the tasks cannot be made in another interpreter: {last}")
    found = json.loads(done.stdout)
    return found["digests"], found["mark"]


def _class(request: dict[str, Any]) -> Any:
    """The class that a request names; its module by its file where it isn't found by its name."""
    try:
        module = importlib.import_module(request["module"])
    except ImportError:
        spec = importlib.util.spec_from_file_location(request["module"], request["file"] or "")
        if spec is None or spec.loader is None:
            raise
        module = sys.modules[request["module"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = module
    for name in request["name"].split("."):
        found = getattr(found, name)
    return found


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    sys.path.extend(each for each in request["path"] if each not in sys.path)
    with redirect_stdout(sys.stderr):
        tasks = _class(request).model_validate(request["config"]).build()
        made = digests(tasks, request["count"])
    json.dump({"digests": made, "mark": hash(MARK)}, sys.stdout)


if __name__ == "__main__":
    try:
        main()
    except RollwrightError as error:
        sys.exit(str(error))
