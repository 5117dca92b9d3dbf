"""What every provider of this user on this machine owns, in one folder, written down before it exists.

Role: the reaper's list of whom to look for. Neighbours: a provider enters itself before it makes anything and
leaves when it closed cleanly; `owners` reads it. Invariants: the folder is this user's alone; a record is
made, and removed, only while the folder is locked, so that who holds the lock sees every living provider and
each record with its head; a line is one write, and a line that was cut is left out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollwright.clock import Clock, SystemClock
from rollwright.errors import SandboxError, SandboxUnavailable
from rollwright.sandbox import processes
from rollwright.wire import SCHEMA

SUFFIX = ".jsonl"
_ROUND_BYTES = 64 * 2**10
"""Size at which a record is written anew without what is gone, if that is most of it."""
_LOCK_SECONDS, _PAUSE_SECONDS = 10.0, 0.01
_TRIES = 100


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    """One line of a record."""


class Provider(_Line, frozen=True, kw_only=True, tag="provider"):
    """The first line: who it is, and the host process it lives and dies with."""

    schema: int
    id: str
    backend: str
    root: str
    """Folder that its sandboxes lie in, without a link on the way."""
    label: str
    """What it is for: a run, a test, a benchmark."""
    host: int
    host_started: int
    """Clock ticks since boot."""
    boot: str
    numbers: str
    """Which numbering of processes `host` is of."""
    created: float
    """Wall seconds."""

    @property
    def here(self) -> bool:
        """Whether its process numbers mean anything: it is of this boot."""
        return self.boot == processes.boot()

    @property
    def living(self) -> bool:
        """Whether its host runs; one that is numbered elsewhere (in a container that shares the folder)
        cannot be seen, and counts as living while this boot lasts."""
        seen = self.numbers == processes.numbers()
        return self.here and (not seen or processes.same(self.host, self.host_started))


class Helper(_Line, frozen=True, kw_only=True, tag="process"):
    """A process of its own: a zygote."""

    pid: int
    started: int


class Cgroup(_Line, frozen=True, kw_only=True, tag="cgroup"):
    """A cgroup of its own, with all that is below."""

    path: str


class Folder(_Line, frozen=True, kw_only=True, tag="folder"):
    """A folder of its own besides its sandboxes'."""

    path: str


class Made(_Line, frozen=True, kw_only=True, tag="sandbox"):
    """A sandbox, about to be made."""

    id: str
    owner: str


class Gone(_Line, frozen=True, kw_only=True, tag="gone"):
    """A sandbox that was killed."""

    id: str


Line = Provider | Helper | Cgroup | Folder | Made | Gone


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it was read."""

    path: Path
    provider: Provider
    helpers: tuple[Helper, ...] = ()
    cgroups: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    """Of its own; its sandboxes' are those below `root` named by `sandboxes`."""
    sandboxes: tuple[Made, ...] = ()
    """Those that were not said to be gone."""


class Entry:
    """A living provider's record. Its methods cost one write each and may be called from any thread; what is
    said after `leave` is dropped. Those that say what is about to be raise `SandboxError` where it cannot be
    written."""

    def __init__(self, registry: Registry, provider: Provider) -> None:
        self.id = provider.id
        """Names cgroups and folders, so that no two providers' are the same."""
        self._registry, self._provider = registry, provider
        self._path = registry.folder / (provider.id + SUFFIX)
        self._file, self._size, self._round_at = -1, 0, _ROUND_BYTES
        self._turn = threading.Lock()

    def add_process(self, pid: int) -> None:
        """A process of the provider's own that runs; it goes with its session, if it leads one."""
        self._say(Helper(pid=pid, started=processes.started(pid)))

    def add_cgroup(self, path: Path) -> None:
        """A cgroup that is about to be made. It has this entry's id in its name."""
        self._say(Cgroup(path=str(path)))

    def add_folder(self, path: Path) -> None:
        """A folder that is about to be made, outside the sandboxes' own (`root`/id)."""
        self._say(Folder(path=str(path.resolve())))

    def sandbox(self, id: str, owner: str) -> None:
        """A sandbox that is about to be made; its folder, if it has one, is `root`/`id`."""
        self._say(Made(id=id, owner=owner))

    def gone(self, id: str) -> None:
        """That sandbox was killed and nothing of it is left."""
        self._say(Gone(id=id))

    def leave(self) -> None:
        """Nothing is left: take the record away; idempotent."""
        with self._turn:
            file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
            self._registry.remove(self._path)

    def _say(self, line: Line) -> None:
        with self._turn:
            if self._file < 0:
                return
            try:
                self._size += os.write(self._file, msgspec.json.encode(line) + b"\n")
                if self._size > self._round_at:
                    self._rewrite()
            except OSError as error:
                raise SandboxError(
                    f"{self._path}, where sandboxes are written down, cannot be written ({error.strerror}): "
                    "make room there"
                ) from error

    def open(self) -> None:
        """Put the record there; the registry calls it, locked."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        os.write(self._file, msgspec.json.encode(self._provider) + b"\n")

    def _rewrite(self) -> None:
        """Leave out what is gone. Until the rename the record before stands."""
        draft = self._path.with_suffix(".draft")
        with self._registry.locked():
            recorded = read(self._path)
            if recorded is None:
                return
            lines: list[Line] = [recorded.provider, *recorded.helpers, *recorded.sandboxes]
            lines += [Cgroup(path=str(path)) for path in recorded.cgroups]
            lines += [Folder(path=str(path)) for path in recorded.folders]
            draft.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            before, self._file = self._file, os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            draft.replace(self._path)
            os.close(before)
        self._size = os.fstat(self._file).st_size
        self._round_at = max(_ROUND_BYTES, 2 * self._size)


class Registry:
    """The folder of records. `folder` is for tests; else it is found (`places`)."""

    def __init__(self, folder: Path | None = None, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.folder = folder or next((place for place in places() if _usable(place.parent)), places()[-1])

    def enter(self, *, backend: str, root: Path, label: str = "") -> Entry:
        """Write down a provider before it makes anything.

        Raises:
            SandboxUnavailable: the folder cannot be used.
        """
        host, started = processes.host()
        provider = Provider(
            schema=SCHEMA,
            id=uuid.uuid4().hex,
            backend=backend,
            root=str(root.resolve()),
            label=label,
            host=host,
            host_started=started,
            boot=processes.boot(),
            numbers=processes.numbers(),
            created=self._clock.wall(),
        )
        entry = Entry(self, provider)
        for _ in range(_TRIES):
            self._make()
            with contextlib.suppress(FileNotFoundError), self.locked():  # removed by who left it last
                entry.open()
                return entry
        raise SandboxUnavailable(f"{self.folder} vanishes as soon as it is made: does something clean it up?")

    def records(self) -> list[Recorded]:
        """Every record that can be read, of living and dead. Call it `locked`: what has no head then was cut
        when its host was killed in the act, and is removed, as are drafts."""
        found = []
        for path in sorted(self.folder.iterdir()):
            if path.suffix == ".draft":
                path.unlink(missing_ok=True)
            elif path.suffix == SUFFIX:
                recorded = read(path)
                if recorded is not None:
                    found.append(recorded)
                elif not _of_another_version(path):
                    path.unlink(missing_ok=True)
        return found

    def remove(self, path: Path) -> None:
        """Take a record away, and the folder with the last one."""
        with contextlib.suppress(FileNotFoundError), self.locked():
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def forget(self, paths: Sequence[Path], roots: Sequence[Path]) -> None:
        """Take records of the dead away, and their root folders where those are empty and no living provider
        has entered with them; what is in one is not recorded, and stays."""
        with contextlib.suppress(FileNotFoundError), self.locked():
            living = {each.provider.root for each in self.records() if each.provider.living}
            for root in roots:
                if str(root) not in living:
                    with contextlib.suppress(OSError):
                        root.rmdir()
            for path in paths:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; the kernel lets go of it when this process ends.

        Raises:
            FileNotFoundError: there is none.
            SandboxUnavailable: it cannot be used, or is held for too long.
        """
        folder = self._open()
        try:
            until = self._clock.now() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock.now() > until:
                        raise SandboxUnavailable(
                            f"{self.folder} is held by another process for more than {_LOCK_SECONDS:g} s: "
                            "end what does not answer (fuser shows it)"
                        ) from None
                    self._clock.pause(_PAUSE_SECONDS)
            yield
        finally:
            os.close(folder)

    def _make(self) -> None:
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            return
        except OSError as error:
            raise SandboxUnavailable(
                f"{self.folder}, where the owners of sandboxes are written down, cannot be made "
                f"({error.strerror}): let TMPDIR name a folder that you may write to"
            ) from error

    def _open(self) -> int:
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            why = "is a link or a file" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
            raise self._refusal(str(why)) from error
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(folder)
            raise self._refusal(f"has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}")
        return folder

    def _refusal(self, why: str) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"{self.folder}, where the owners of sandboxes are written down, {why}; expected a folder of "
            f"user {os.geteuid()} with mode 0700: remove it"
        )


def places() -> tuple[Path, ...]:
    """Where a registry of this user may lie, the preferred first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    plain = Path(tempfile.gettempdir()).absolute() / f"rollwright-{os.geteuid()}"
    return (Path(runtime) / "rollwright", plain) if runtime.startswith("/") else (plain,)


def _usable(parent: Path) -> bool:
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


def _of_another_version(path: Path) -> bool:
    """Whether a record that cannot be read is whole: another version of this package wrote it."""
    try:
        head = msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError):
        return False
    return bytes(head.get("schema", b"")) != str(SCHEMA).encode()


def read(path: Path) -> Recorded | None:
    """A record; None where there is none, or its first line is not a provider's of this version."""
    try:
        first, *rest = path.read_bytes().split(b"\n")
        provider = msgspec.json.decode(first, type=Provider)
    except (OSError, msgspec.MsgspecError):
        return None
    if provider.schema != SCHEMA:
        return None
    helpers: list[Helper] = []
    cgroups: dict[Path, None] = {}
    folders: dict[Path, None] = {}
    sandboxes: dict[str, Made] = {}
    for text in rest:
        try:
            line = msgspec.json.decode(text, type=Helper | Cgroup | Folder | Made | Gone)
        except msgspec.MsgspecError:  # cut when its host was killed
            continue
        match line:
            case Helper():
                helpers.append(line)
            case Cgroup():
                cgroups[Path(line.path)] = None
            case Folder():
                folders[Path(line.path)] = None
            case Made():
                sandboxes[line.id] = line
            case Gone():
                sandboxes.pop(line.id, None)
    return Recorded(
        path=path,
        provider=provider,
        helpers=tuple(helpers),
        cgroups=tuple(cgroups),
        folders=tuple(folders),
        sandboxes=tuple(sandboxes.values()),
    )
