"""What this machine has: Python, cores, memory, disk, devices, programs.

Role: the hardware half of `rollwright doctor`. Neighbours: `doctor` judges with it. Invariants: limits of a
container count, not what lies outside of it; what cannot be found out is said to be unknown.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rollwright.run.capacity import cores, memory
from rollwright.run.derived import Derived, human
from rollwright.run.finding import Finding, State
from rollwright.run.preflight import nearest, writable

PYTHONS = ((3, 11), (3, 13))
"""First and last minor version that the tests have run on."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def python() -> Iterator[Finding]:
    """The interpreter and the system below it."""
    first, last = ((f"{major}.{minor}") for major, minor in PYTHONS)
    known = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    mend = "" if known else f"tested with {first} to {last}: take one of those if something fails"
    yield Finding("version", State.OK if known else State.LIMITED, platform.python_version(), mend)
    yield Finding("system", State.OK, f"{platform.system()} {platform.release()} {platform.machine()}")


def hardware(folder: Path, needs: Derived) -> Iterator[Finding]:
    """Cores, memory, and the disk of the folder for runs."""
    count = cores()
    slow = "" if count >= 2 else "rollouts and training take turns on one core: slower, nothing else"
    yield Finding("cores", State.OK if count >= 2 else State.LIMITED, f"{count:g}", slow)
    found = memory()
    if found is None:
        yield Finding("memory", State.LIMITED, "unknown", "this system doesn't say")
    else:
        yield Finding("memory", State.OK, f"{human(found[0])}, {human(found[1])} available")
    yield from disk(folder, needs)


def disk(folder: Path, needs: Derived) -> Iterator[Finding]:
    """Whether runs can be kept in `folder`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    writable(folder)
    free = shutil.disk_usage(nearest(folder)).free
    text = (
        f"{human(free)} free for '{folder}'; a run with the defaults needs {human(needs.disk_bytes)} at most"
    )
    enough = free >= needs.disk_bytes
    yield Finding("disk", State.OK if enough else State.BAD, text, "" if enough else "free space")


def torch() -> Iterator[Finding]:
    """torch, its threads and the devices it sees."""
    if find_spec("torch") is None:
        yield Finding("torch", State.BAD, "not installed", "pip install 'rollwright[torch]'")
        return
    try:
        import torch as library
    except Exception as error:  # boundary: a broken installation fails in any way
        what = " ".join(f"{type(error).__name__}: {error}".split())
        yield Finding("torch", State.BAD, f"cannot be imported ({what})", "install torch anew")
        return
    yield Finding(
        "torch", State.OK, f"{library.__version__}, {library.get_num_threads()} threads in this process"
    )
    ours = "engine and trainer of this version compute on the CPU"
    if library.cuda.is_available():
        for index in range(library.cuda.device_count()):
            card = library.cuda.get_device_properties(index)
            yield Finding(f"cuda:{index}", State.LIMITED, f"{card.name}, {human(card.total_memory)}", ours)
    else:
        yield Finding("cuda", State.ABSENT, "no device")
    mps = library.backends.mps.is_available()
    yield Finding(
        "mps", State.LIMITED if mps else State.ABSENT, "yes" if mps else "no device", ours if mps else ""
    )


def programs() -> Iterator[Finding]:
    """Programs that some parts use."""
    wanted = {"git": (("git",), "for development"), "chromium": (BROWSERS, "for the report's browser test")}
    for name, (names, why) in wanted.items():
        found = next(filter(None, map(shutil.which, names)), None)
        mend = "" if found else f"only {why}: install it with your system's package manager"
        yield Finding(name, State.OK if found else State.ABSENT, "found" if found else "not found", mend)
