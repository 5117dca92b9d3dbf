"""What agent code leaves for the host to read, write, unpack or delete.

Role: probes that every backend stops, whatever it declares. Neighbours: `bait` has the folder that links lead
to. Invariant: agent code prepares, the host's own call is what is tested.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Awaitable

from rollwright.errors import SandboxError, SandboxLost
from rollwright.sandbox.base import Sandbox, SandboxProvider
from rollwright.testing.probes import bait
from rollwright.testing.probes.base import SECONDS, Observation, agent, attacked, probe, ran, serves, short
from rollwright.types import CallStatus

_REFUSED = (OSError, SandboxError)
"""How a method of `Files` says no; `SandboxLost` is no answer to what an agent did."""


async def _answer(call: Awaitable[object]) -> object:
    """What it gives, or the name of its refusal."""
    try:
        async with asyncio.timeout(SECONDS):
            return await call
    except SandboxLost:
        raise
    except _REFUSED as error:
        return type(error).__name__


def _always(trouble: list[str]) -> Observation:
    return Observation("always", not trouble, "; ".join(trouble))


_LINKS = """
os.symlink(folder, 'way')
os.symlink(folder + '/secret', 'file')
os.symlink('..', 'up')
os.symlink(folder + '/made', 'dangling')
os.symlink('/proc/self/root', 'root')
"""


@probe
async def links_in_paths(provider: SandboxProvider) -> Observation:
    """Read, write, list, remove, upload and download through links that lead outside."""
    async with attacked(provider) as sandbox:
        with bait.folder() as outside:
            await ran(sandbox, agent(_LINKS, folder=str(outside.path)))
            files, here = sandbox.files, str(outside.path)
            paths = ["way/secret", "file", f"root{here}/secret", f"{here}/secret", f"up{here}/secret"]
            paths += [f"{'../' * 40}{here[1:]}/secret", "dangling", "way/made"]
            said = [await _answer(files.read(path)) for path in paths]
            said += [await _answer(files.write(path, b"overwritten")) for path in paths]
            folders = ["way", f"root{here}", here, "up", f"{'../' * 40}{here[1:]}"]
            archive = _archive(("made", tarfile.REGTYPE, ""))
            for path in folders:
                said += [await _answer(files.list(path)), await _answer(files.download(path))]
                said += [await _answer(files.upload(archive, path))]
                said += [await _answer(files.remove(f"{path}/doomed"))]
            said += [await _answer(files.list()), await _answer(files.download())]
            await _answer(files.remove("way"))
            trouble = ["the secret was read"] * (outside.secret in repr(said))
            trouble += ["the folder outside was changed"] * outside.changed()
        trouble += filter(None, [await serves(sandbox)])
    return _always(trouble)


_SWAP = """
if os.fork() == 0:
    signal.alarm(10)
    os.makedirs('real', exist_ok=True)
    open('real/secret', 'w').write('own')
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for target in ('real', folder):
            try:
                os.symlink(target, 'next')
                os.rename('next', 'swapped')
            except OSError:
                pass
        try:
            os.unlink('swapped')
            os.mkdir('swapped')
            open('swapped/secret', 'w').write('own')
            os.unlink('swapped/secret')
            os.rmdir('swapped')
        except OSError:
            pass
    os._exit(0)
"""


@probe
async def folders_swapped_for_links(provider: SandboxProvider) -> Observation:
    """A folder that becomes a link, and back, while the host walks through it."""
    async with attacked(provider) as sandbox:
        with bait.folder() as outside:
            await ran(sandbox, agent(_SWAP, folder=str(outside.path)))
            read = False
            for number in range(60):
                for call in (
                    sandbox.files.read("swapped/secret"),
                    sandbox.files.write(f"swapped/made{number}", b"x"),
                    sandbox.files.list("swapped"),
                    sandbox.files.remove("swapped/doomed"),
                ):
                    read |= outside.secret in repr(await _answer(call))
            trouble = ["the secret was read"] * read
            trouble += ["the folder outside was changed"] * outside.changed()
    return _always(trouble)


def _archive(*members: tuple[str, bytes, str]) -> bytes:
    """A tar archive of (name, type, link target); regular files hold one byte."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            member.size = 1 if kind == tarfile.REGTYPE else 0
            file.addfile(member, io.BytesIO(b"x") if member.size else None)
    return data.getvalue()


@probe
async def hostile_archives(provider: SandboxProvider) -> Observation:
    """Archives whose members lead outside, are links, devices or FIFOs, or no archive at all; all refused
    before anything is written."""
    async with attacked(provider) as sandbox:
        with bait.folder() as outside:
            file, here = tarfile.REGTYPE, str(outside.path)
            first = ("first", file, "")
            secret, climbing = f"{here}/secret", "../" * 40 + here[1:]
            link, hard = tarfile.SYMTYPE, tarfile.LNKTYPE
            hostile = {
                "..": _archive(first, (f"{climbing}/made", file, "")),
                "absolute": _archive(first, (f"{here}/made", file, "")),
                "a link": _archive(first, ("way", link, here), ("way/made", file, "")),
                "a link to a file": _archive(first, ("f", link, secret), ("f", file, "")),
                "a hard link": _archive(first, ("f", hard, secret), ("f", file, "")),
                "a hard link to ..": _archive(first, ("f", hard, f"{climbing}/secret")),
                "a device": _archive(first, ("null", tarfile.CHRTYPE, "")),
                "a FIFO": _archive(first, ("fifo", tarfile.FIFOTYPE, "")),
                ". within": _archive(first, (f"a/../{climbing}/made", file, "")),
                "noise": b"no archive" * 100,
            }
            trouble = []
            for name, archive in hostile.items():
                said = await _answer(sandbox.files.upload(archive))
                trouble += [f"{name}: accepted"] * (said is None)
            if left := await sandbox.files.list():
                trouble.append(f"written before it was refused: {left}")
            trouble += ["the folder outside was changed"] * outside.changed()
        trouble += filter(None, [await serves(sandbox)])
    return _always(trouble)


_FIFO = """
os.mkfifo('fifo')
os.makedirs('deep/er')
os.mkfifo('deep/er/fifo')
open('plain', 'w').close()
"""


@probe
async def fifos(provider: SandboxProvider) -> Observation:
    """A FIFO where the host expects a file: no call waits for its other end."""
    async with attacked(provider) as sandbox:
        await ran(sandbox, agent(_FIFO))
        trouble = []
        for path in ("fifo", "deep/er/fifo"):
            for call in (sandbox.files.read(path), sandbox.files.write(path, b"x")):
                said = await _answer(call)
                trouble += [f"{path}: {said}"] * (said != "PermissionError")
        listed = await _answer(sandbox.files.list())
        trouble += [f"listed: {listed}"] * (listed != ["plain"])
        said = await _answer(sandbox.files.download())
        trouble += [f"download: {said}"] * (said == "TimeoutError")
        trouble += filter(None, [await serves(sandbox)])
    return _always(trouble)


_NESTED = """
start = os.getcwd()
for _ in range(1500):
    os.mkdir('d' * 200)
    os.chdir('d' * 200)
open('bottom', 'w').write('x')
os.chdir(start)
"""


@probe
async def nested_folders(provider: SandboxProvider) -> Observation:
    """1,500 folders in one another, each with a name of 200 bytes: listed, packed or refused, and deleted."""
    async with attacked(provider) as sandbox:
        made = await sandbox.run_code(agent(_NESTED), timeout=SECONDS)
        await _answer(sandbox.files.list())
        await _answer(sandbox.files.download())
        trouble = [] if made.status is CallStatus.OK else [f"not made: {short(made)}"]
        trouble += filter(None, [await serves(sandbox)])
        await _answer(sandbox.files.remove("d" * 200))
        await _answer(sandbox.files.list())
    return _always(trouble)


_NAMES = """
for name in (b'\\xff\\xfe', b'new\\nline', b'tab\\t', b'-rf', b' ', b'\\xed\\xa0\\x80', b'x' * 255):
    with open(name, 'wb') as file:
        file.write(b'x')
attempt(lambda: open('x' * 256, 'wb'))
"""


@probe
async def strange_names(provider: SandboxProvider) -> Observation:
    """Names that are no UTF-8, hold line breaks or have more than 255 bytes."""
    async with attacked(provider) as sandbox:
        told = await ran(sandbox, agent(_NAMES))
        trouble = ["a name of 256 bytes was taken"] * (told != "'OSError'")
        await _answer(sandbox.files.list())
        await _answer(sandbox.files.download())
        for name in ("y" * 256, "ä" * 128, "a/" + "y" * 300, "a\0b", "\udcff", "y" * 5000):
            said = await _answer(_checked(sandbox, name))
            trouble += [f"{name[:8]!r}…: {said}"] * (said is None)
        trouble += filter(None, [await serves(sandbox)])
    return _always(trouble)


async def _checked(sandbox: Sandbox, name: str) -> None:
    """Write it; a name that cannot be encoded may be refused as a `ValueError` too."""
    try:
        await sandbox.files.write(name, b"x")
    except ValueError as error:
        raise PermissionError(str(error)) from error
