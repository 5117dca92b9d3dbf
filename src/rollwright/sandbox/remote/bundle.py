"""The program that a remote sandbox is given: some of our own modules as one zip file.

Role: what `provider` uploads. Neighbours: `inside`, and the modules of the local backends that it shares.
Invariant: the same sources give the same bytes.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from importlib.resources import files

_MODULES = (
    "errors.py",
    "sandbox/archive.py",
    "sandbox/files.py",
    "sandbox/lean.py",
    "sandbox/worker.py",
    "sandbox/remote/inside/ask.py",
    "sandbox/remote/inside/helper.py",
    "sandbox/remote/inside/limits.py",
)
_PACKAGES = ("", "sandbox/", "sandbox/remote/", "sandbox/remote/inside/")
_MAIN = "from rollwright.sandbox.remote.inside.ask import main\nmain()\n"


@cache
def bundle() -> bytes:
    """A zip file that `python3 -I -S` runs."""
    package = files("rollwright")
    texts = {"__main__.py": _MAIN, **{f"rollwright/{name}__init__.py": "" for name in _PACKAGES}}
    texts |= {f"rollwright/{name}": package.joinpath(name).read_text("utf-8") for name in _MODULES}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(texts):
            archive.writestr(zipfile.ZipInfo(name), texts[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()
