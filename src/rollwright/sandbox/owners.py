"""Who owns a sandbox's folder and processes, written down before they exist; and the reaper.

Role: removes what dead hosts left, of one root folder (`reap`) or of this whole machine (`reap_all`).
Neighbours: `instance` writes records into folders, providers enter themselves in `registry`; a run and
`rollwright doctor --reap` call it. Invariants: the record lies outside the folder the agent can write; a
process is only killed if it belongs to a recorded session and started after it, so a reused number is safe;
what a living host owns is left alone; nothing is removed that is not recorded; two reapers at once do each
thing once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollwright.clock import Clock, SystemClock
from rollwright.sandbox import processes, remains
from rollwright.sandbox.processes import alive
from rollwright.sandbox.registry import Entry, Helper, Recorded, Registry, places, read
from rollwright.wire import SCHEMA

__all__ = ["Entry", "Owner", "Reaped", "Registry", "alive", "reap", "reap_all", "record", "record_worker"]

_RECORD = "owners.jsonl"
_WORKERS = "workers"
_AT_ONCE = 64
"""Dead providers whose records one reaper holds at the same time."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who made the sandbox: a rollout, and the host process that serves it."""

    schema: int
    owner: str
    host: int
    host_started: int
    boot: str
    created: float

    @property
    def living(self) -> bool:
        """Whether its host runs."""
        return self.boot == processes.boot() and processes.same(self.host, self.host_started)


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """How much of dead owners was removed."""

    processes: int = 0
    cgroups: int = 0
    mounts: int = 0
    folders: int = 0
    owners: tuple[str, ...] = ()
    """Whose it was: label or root folder of each provider that was taken off the list."""

    def __add__(self, other: Reaped) -> Reaped:
        return Reaped(
            processes=self.processes + other.processes,
            cgroups=self.cgroups + other.cgroups,
            mounts=self.mounts + other.mounts,
            folders=self.folders + other.folders,
            owners=self.owners + other.owners,
        )

    def __bool__(self) -> bool:
        return self != Reaped()


def record(folder: Path, owner: str, wall: float) -> None:
    """Write down who owns `folder`, before anything runs in it."""
    host, started = processes.host()
    entry = Owner(
        schema=SCHEMA, owner=owner, host=host, host_started=started, boot=processes.boot(), created=wall
    )
    with (folder / _RECORD).open("ab") as file:  # appended: replacing a file makes ext4 write to the disk
        file.write(msgspec.json.encode(entry) + b"\n")


def record_worker(folder: Path, pid: int) -> None:
    """Write down a worker's session."""
    with (folder / _WORKERS).open("a") as file:
        file.write(f"{pid} {processes.started(pid)}\n")


def reap(root: Path, *, empty: bool = True) -> int:
    """Remove what dead hosts left below `root`, processes first; returns how many sandboxes that were. With
    `empty`, folders without a record too: only where no living host works in `root`, as it may be about to
    write one."""
    return _reap_folders(root, empty=empty).folders


def _reap_folders(root: Path, *, empty: bool) -> Reaped:
    gone = Reaped()
    for folder in [entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()]:
        with _held(folder / _RECORD) as mine:
            try:
                line = (folder / _RECORD).read_bytes().partition(b"\n")[0]  # every line names the same host
                owner = msgspec.json.decode(line, type=Owner)
            except (OSError, msgspec.MsgspecError):
                if empty:
                    with contextlib.suppress(OSError):
                        folder.rmdir()  # killed before it owned anything; any other is not ours to delete
                continue
            if mine and not owner.living:
                ended = 0
                if owner.boot == processes.boot():
                    ended = processes.end_sessions(_sessions(folder / _WORKERS))
                mounts = remains.unmount_below([folder.resolve()])
                removed = remains.remove_folder(folder)
                gone += Reaped(processes=ended, mounts=mounts, folders=int(removed))
    return gone


def _sessions(path: Path) -> dict[int, int]:
    """Leader → start time of the sessions in a sandbox's record."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                pid, started = map(int, line.split())
                found[pid] = started
    return found


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Hold a record against a second reaper, who leaves it alone: whether it is ours to reap. The kernel lets
    go of it when this process ends."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(file)


def reap_all(folder: Path | None = None, *, clock: Clock | None = None) -> Reaped:
    """Remove what dead owners on this machine left: processes, cgroups, mounts, folders, in this order.

    Args:
        folder: of the registry; else every place where this user's may lie.
        clock: waits for processes to end.

    Raises:
        SandboxUnavailable: the registry's folder is a link, or not this user's alone.
    """
    gone = Reaped()
    for place in places() if folder is None else (folder,):
        registry = Registry(place, clock=clock)
        try:
            with registry.locked():
                found = registry.records()
        except FileNotFoundError:
            continue
        living = [Path(each.provider.root) for each in found if each.provider.living]
        dead = [each for each in found if not each.provider.living]
        for first in range(0, len(dead), _AT_ONCE):
            gone += _reap_some(dead[first : first + _AT_ONCE], living, registry, clock or SystemClock())
    return gone


def _reap_some(dead: Sequence[Recorded], living: Sequence[Path], registry: Registry, clock: Clock) -> Reaped:
    """Those of `dead` that no other reaper holds, and their records."""
    gone, done = Reaped(), list[Recorded]()
    with contextlib.ExitStack() as held:
        for each in dead:
            if held.enter_context(_held(each.path)) and read(each.path) is not None:
                gone += _reap_provider(each, living, clock)
                done.append(each)
        if done:
            registry.forget([each.path for each in done], [Path(each.provider.root) for each in done])
    return gone


def _reap_provider(each: Recorded, living: Sequence[Path], clock: Clock) -> Reaped:
    """Remove what one dead provider left; `living` are the roots of those that live."""
    root, here = Path(each.provider.root), each.provider.here
    gone = Reaped(owners=(each.provider.label or each.provider.root,))
    if here:
        gone += Reaped(
            processes=sum(map(_end_helper, each.helpers)),
            cgroups=sum(remains.remove_cgroup(path, clock) for path in each.cgroups),
        )
    own = [*each.folders, *(root / made.id for made in each.sandboxes if _is_name(made.id))]
    own = [path for path in own if remains.is_straight(path)]
    inner = [path for path in living if any(folder == path or folder in path.parents for folder in own)]
    if remains.is_straight(root):
        if here:
            mounts = remains.unmount_below([root], besides=living) + remains.unmount_below(own, besides=inner)
            gone += Reaped(mounts=mounts)
        gone += _reap_folders(root, empty=root not in living)
    return gone + Reaped(folders=0 if inner else sum(map(remains.remove_folder, own)))


def _end_helper(helper: Helper) -> int:
    if not processes.same(helper.pid, helper.started):
        return 0
    ended = processes.end_sessions({helper.pid: helper.started})
    return ended + processes.end([helper.pid], lambda pid: processes.same(pid, helper.started))


def _is_name(text: str) -> bool:
    return bool(text) and "/" not in text and text not in (".", "..")
