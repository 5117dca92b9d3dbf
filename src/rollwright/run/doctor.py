"""What this machine can do, what is missing, and how to get it.

Role: `rollwright doctor`. Neighbours: `machine` looks at hardware and interpreter, `sandbox.probe` tries the
walls; the command prints. Invariants: nothing of it is left behind; each section is found out on its own,
so that one that fails hides no other; ready means that `rollwright train` with the defaults can start here.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollwright.config import CHOICES, RunConfig
from rollwright.errors import MissingExtra, PluginError, RollwrightError
from rollwright.plugins import load, registered
from rollwright.run import machine
from rollwright.run.derived import derive
from rollwright.run.finding import Finding, State
from rollwright.run.preflight import taskset
from rollwright.sandbox import owners
from rollwright.sandbox.auto import candidates
from rollwright.sandbox.base import Guarantee, Guarantees, SandboxProvider
from rollwright.sandbox.config import AutoSandbox
from rollwright.sandbox.provider import REQUIRED

GROUPS = {branch: group for branch, (group, _) in CHOICES.items()} | {"tools": "rollwright.tools"}
TORCH_PARTS = {("engine", "embedded")}
"""Parts that torch computes for; their configuration loads without it."""
KEEPS = {
    "fs": "your files are out of reach",
    "net": "no network",
    "pids": "number of processes",
    "memory": "no more than its share",
    "disk": "no more than its share",
    "kill": "no process outlives its sandbox",
    "kernel_surface": "few system calls",
}
BEST = {
    "net": "some way out is open: Linux ≥ 6.7 closes TCP, seccomp (x86-64, AArch64) all of it",
    "pids": "counted for the whole user, not for one sandbox",
    "memory": "limited for each process, not for all of a sandbox together",
    "disk": "limited for each file, not for all of a sandbox together",
    "kernel_surface": "a filter; the kernel is shared: use a virtual machine for code that attacks kernels",
}
GET = {
    "fs": "user namespaces, or Linux ≥ 5.13 with Landlock among its security modules (kernel command line: "
    "lsm=landlock,…)",
    "net": "Linux with seccomp, on x86-64 or AArch64",
    "pids": "user namespaces (backend native), or another user than root, who is exempt",
    "memory": "Linux with resource limits (RLIMIT_AS); for all of a sandbox together, cgroups that may be "
    "written (backend native)",
    "disk": "user namespaces (backend native); Linux with resource limits (RLIMIT_FSIZE) for each file",
    "kill": "Linux with seccomp, on x86-64 or AArch64",
    "kernel_surface": "Linux with seccomp, on x86-64 or AArch64",
}
UNSAFE = "or run agent code without isolation: rollwright train --unsafe-sandbox"


@dataclass(frozen=True)
class Examination:
    """All sections, and why training cannot start here (nothing: it can)."""

    sections: dict[str, tuple[Finding, ...]]
    reasons: tuple[str, ...]

    @property
    def ready(self) -> bool:
        """Whether training with the defaults can start here."""
        return not self.reasons

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        sections = {name: [each.tree() for each in found] for name, found in self.sections.items()}
        return {"ready": self.ready, "reasons": list(self.reasons), "sections": sections}


def examine(folder: Path, *, reap: bool = False) -> Examination:
    """Look at everything; `folder` is where runs would be kept. With `reap`, what dead owners of sandboxes
    left is removed first."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        **({"leftovers": partial(leftovers, folder)} if reap else {}),
        "python": machine.python,
        "machine": partial(_machine, folder),
        "torch": machine.torch,
        "sandbox": isolation,
        "parts": parts,
        "extras": extras,
        "programs": machine.programs,
    }
    sections = {name: tuple(_look(name, look)) for name, look in looks.items()}
    bad = [(name, each) for name, found in sections.items() for each in found if each.state is State.BAD]
    reasons = tuple(
        f"{label(name, each)}: {each.value}" + (f"; {each.mend}" if each.mend else "") for name, each in bad
    )
    return Examination(sections, reasons)


def label(section: str, finding: Finding) -> str:
    """What a finding is called: section and name, once where they are the same."""
    return section if finding.name == section else f"{section}: {finding.name}"


def _look(name: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What `look` finds; where it fails, that."""
    try:
        yield from look()
    except Exception as error:  # boundary: a section that fails hides no other
        ours = isinstance(error, RollwrightError)
        text = str(error) if ours else f"could not be found out ({type(error).__name__}: {error})"
        yield Finding(name, State.BAD, " ".join(text.split()))


def _machine(folder: Path) -> Iterator[Finding]:
    config = RunConfig()
    return machine.hardware(folder, derive(config, taskset(config)))


def leftovers(folder: Path) -> Iterator[Finding]:
    """Remove what dead owners left, of this user on this machine and of the runs in `folder`."""
    gone = owners.reap_all()
    kept = sum(owners.reap(root, empty=False) for root in folder.glob("*/sandboxes/*/"))
    counts = {
        "process": gone.processes,
        "cgroup": gone.cgroups,
        "mount": gone.mounts,
        "folder": gone.folders + kept,
    }
    some = [f"{count} {what}{_plural(what, count)}" for what, count in counts.items() if count]
    yield Finding("removed", State.OK, ", ".join(some) or "nothing was left")
    for owner, count in sorted(Counter(gone.owners).items()):
        yield Finding("owner", State.OK, owner if count == 1 else f"{owner}, {count} times")


def _plural(noun: str, count: int) -> str:
    return "" if count == 1 else "es" if noun.endswith("s") else "s"


def isolation() -> Iterator[Finding]:
    """What sandboxes really keep on this machine, tried: each guarantee of the backend that `auto` takes,
    then every local backend in one line."""
    with tempfile.TemporaryDirectory(prefix="rollwright-doctor-") as root:
        tried = {config.type: asyncio.run(_tried(config, Path(root) / config.type)) for config in _local()}
    chosen = [config.type for config in AutoSandbox().candidates()]
    auto = next((name for name, kept in tried.items() if name in chosen and _enough(kept)), None)
    if auto is None:
        yield from _none_keeps(tried)
    else:
        yield Finding("auto", State.OK, f"takes the backend '{auto}'")
        for name, what in KEEPS.items():
            yield judged(name, what, getattr(tried[auto], name))
    for backend, kept in tried.items():
        if isinstance(kept, str):
            yield Finding(backend, State.ABSENT, f"not usable: {kept}")
        else:
            yield Finding(backend, State.OK if _enough(kept) else State.LIMITED, told(kept))


def _none_keeps(tried: dict[str, Guarantees | str]) -> Iterator[Finding]:
    """Each guarantee as the best of the backends keeps it, where none of them keeps enough."""
    found = [kept for kept in tried.values() if isinstance(kept, Guarantees)]
    for name, what in KEEPS.items():
        kept = sorted((getattr(each, name) for each in found), key=list(Guarantee).index)
        yield judged(name, what, kept[0] if kept else Guarantee.ABSENT)


def _enough(kept: Guarantees | str) -> bool:
    """Whether a backend keeps what a run requires by default."""
    return isinstance(kept, Guarantees) and not kept.missing(REQUIRED)


def _local() -> list[Any]:
    """Configurations of every local backend, strongest first; they require nothing, so that each can be
    looked at."""
    return [_free(config) for config in candidates()]


def _free(config: Any) -> Any:
    free = {"require": (), "unsafe": True}
    return config.model_copy(
        update={key: free[key] for key in free.keys() & type(config).model_fields.keys()}
    )


async def _tried(config: Any, root: Path) -> Guarantees | str:
    """What that backend keeps, or why it cannot be used."""
    try:
        provider: SandboxProvider = config.build(root)
        try:
            await provider.start()
            return provider.guarantees
        finally:
            await provider.close()
    except Exception as error:  # boundary: a backend that fails hides no other
        text = str(error) if isinstance(error, RollwrightError) else f"{type(error).__name__}: {error}"
        return " ".join(text.split())


def told(kept: Guarantees) -> str:
    """Guarantees in one line, the kept ones first."""
    words = {
        Guarantee.ENFORCED: "enforces",
        Guarantee.BEST_EFFORT: "best effort",
        Guarantee.ABSENT: "keeps no",
    }
    parts = []
    for guarantee, word in words.items():
        names = [name for name in KEEPS if getattr(kept, name) is guarantee]
        if names:
            parts.append(f"{word} {', '.join(names)}")
    return "; ".join(parts)


def judged(name: str, what: str, guarantee: Guarantee) -> Finding:
    """One guarantee as the probe saw it."""
    if guarantee is Guarantee.ENFORCED:
        return Finding(name, State.OK, f"{what}: enforced")
    best = guarantee is Guarantee.BEST_EFFORT
    text = f"{what}: {'best effort' if best else 'not kept'}"
    mend = BEST.get(name, GET[name]) if best else GET[name]
    if name in REQUIRED:
        return Finding(name, State.BAD, text, f"{mend}, {UNSAFE}")
    return Finding(name, State.LIMITED if best else State.ABSENT, text, mend)


def parts() -> Iterator[Finding]:
    """Everything that is registered by entry point, and whether it can be used."""
    for branch, group in GROUPS.items():
        names = sorted(registered(group))
        if not names:
            yield Finding(branch, State.BAD, "nothing is registered", "install the package: pip install -e .")
        default = CHOICES[branch][1] if branch in CHOICES else None
        for name in names:
            yield _part(branch, group, name, needed=name == default)


def _part(branch: str, group: str, name: str, *, needed: bool) -> Finding:
    title, state = f"{branch} {name}", State.BAD if needed else State.ABSENT
    try:
        chosen = load(group, name)
        if branch == "tasks" and not any(field.is_required() for field in chosen.model_fields.values()):
            chosen().build()
    except MissingExtra as error:
        return Finding(title, state, "not usable", str(error))
    except PluginError as error:
        return Finding(title, state, str(error))
    except Exception as error:  # boundary: a plug-in's code
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(title, state, f"cannot be built ({what})", "mend or remove the package it comes from")
    if (branch, name) in TORCH_PARTS and find_spec("torch") is None:
        return Finding(title, state, "not usable without torch", "pip install 'rollwright[torch]'")
    return Finding(title, State.OK, "usable")


def extras() -> Iterator[Finding]:
    """Optional dependencies, by extra."""
    for extra, names in sorted(optional(metadata("rollwright").get_all("Requires-Dist") or ()).items()):
        found = {name: _version(name) for name in names}
        missing = [name for name, installed in found.items() if installed is None]
        if missing:
            line = f"pip install 'rollwright[{extra}]'"
            yield Finding(extra, State.ABSENT, f"without {', '.join(missing)}", line)
        else:
            yield Finding(extra, State.OK, ", ".join(f"{name} {number}" for name, number in found.items()))


def optional(requirements: Sequence[str]) -> dict[str, list[str]]:
    """Extra → the distributions it brings, from the metadata of a distribution (PEP 508)."""
    found: dict[str, list[str]] = {}
    for line in requirements:
        name = re.match(r"[A-Za-z0-9][\w.-]*", line)
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)['"]""", line)
        if name and extra:
            found.setdefault(extra[1], []).append(name[0])
    return found


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
