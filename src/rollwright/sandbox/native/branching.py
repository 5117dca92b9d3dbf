"""A persistent interpreter that forks itself: variables stay, files are those of another sandbox.

Role: the operations `let_go`, `branch` and `take` of a live interpreter. Neighbours: `live` gives them to the
worker, `place` asks for them. Invariants: standard library only; it runs in a process that has run agent
code, so nothing depends on its honesty: a dishonest one gets itself a wrong answer, or is ended; what it has
open below the working folder is opened again at the same place in the branch's.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
from typing import Any, NamedTuple

from rollwright.sandbox import confine
from rollwright.sandbox.native import kernel, template

BRANCHED = "branched"
"""What `branch` answers in the fork, which goes on serving."""
_TAKEN_AT_ONCE = os.O_CREAT | os.O_EXCL | os.O_TRUNC


class _Refused(Exception):
    """It cannot be forked as it is."""


class _Opened(NamedTuple):
    descriptor: int
    path: str
    flags: int
    position: int

    def open(self) -> None:
        """Have `descriptor` open at what is at `path` now."""
        again = os.open(self.path, self.flags & ~_TAKEN_AT_ONCE)
        if stat.S_ISREG(os.fstat(again).st_mode):
            os.lseek(again, self.position, os.SEEK_SET)
        os.dup2(again, self.descriptor, os.get_inheritable(self.descriptor))
        os.close(again)


class Branching:
    """Of the interpreter that answers on the stream socket `line`."""

    def __init__(self, line: int) -> None:
        self._line = line
        self._kept: list[_Opened] = []  # what is closed for now

    def let_go(self) -> dict[str, Any]:
        """Have no file open for writing until `branch` or `take`, so that the files can be sealed without a
        copy."""
        try:
            self._check()
            self._kept = [each for each in self._opened(set()) if each.flags & os.O_ACCMODE != os.O_RDONLY]
        except _Refused as refused:
            return {"status": "error", "stderr": str(refused)}
        nothing = os.open(os.devnull, os.O_RDONLY)
        for each in self._kept:
            os.dup2(nothing, each.descriptor, os.get_inheritable(each.descriptor))
        os.close(nothing)
        return {"status": "ok"}

    def take(self) -> dict[str, Any]:
        """Have what `let_go` closed open again."""
        kept, self._kept = self._kept, []
        for each in kept:
            each.open()
        return {"status": "ok"}

    @staticmethod
    def _check() -> None:
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise _Refused(f"the interpreter has {threads} threads; a live fork takes along only one")

    def branch(self) -> dict[str, Any]:
        """Fork, and `take`. After the request come the descriptors of the fork's root and of its line; the
        answer's value is the fork's number."""
        root, line = _received(self._line)
        try:
            self._check()
            folder, opened = _inside("/proc/self/cwd", os.stat(".")), self._opened({root, line})
            _, most = resource.getrlimit(resource.RLIMIT_NPROC)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))  # forks count as processes of all
            pid = kernel.fork_beside()
            if pid:
                self.take()
                return {"status": "ok", "value": str(pid)}
            try:
                self._move(root, line, folder or template.WORK, opened)
            except BaseException:  # boundary: a fork that is not where it belongs must not go on
                os._exit(70)
            return {"status": BRANCHED}
        except _Refused as refused:
            return {"status": "error", "stderr": str(refused)}
        finally:
            os.close(root)
            os.close(line)

    def _move(self, root: int, line: int, folder: str, opened: list[_Opened]) -> None:
        """In the fork."""
        os.dup2(line, self._line, inheritable=False)
        os.setsid()
        confine.adopt_orphans()
        os.fchdir(root)
        os.chroot(".")
        try:
            os.chdir(folder)
        except OSError:
            os.chdir(template.WORK)
        for each in opened:
            each.open()
        self.take()

    def _opened(self, ours: set[int]) -> list[_Opened]:
        """Files and folders below the working folder that are open. Raises `_Refused` where one outside is
        open for writing: both sides would write to it."""
        found = []
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                state = os.fstat(number)
            except OSError:
                continue  # that was the list of them
            if number in ours or not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
                continue
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            path = _inside(f"/proc/self/fd/{number}", state)
            if path is None and flags & os.O_ACCMODE != os.O_RDONLY:
                name = os.readlink(f"/proc/self/fd/{number}")
                raise _Refused(
                    f"{name} is open for writing; a live fork takes along files below {template.WORK} that "
                    "have a name: close it first"
                )
            if path is not None:
                position = os.lseek(number, 0, os.SEEK_CUR) if stat.S_ISREG(state.st_mode) else 0
                found.append(_Opened(number, path, flags, position))
        return found


def _received(line: int) -> tuple[int, int]:
    with socket.socket(fileno=os.dup(line)) as end:
        _, descriptors, _, _ = socket.recv_fds(end, 1, 2, socket.MSG_CMSG_CLOEXEC)
    root, theirs = descriptors
    return root, theirs


def _inside(link: str, state: os.stat_result) -> str | None:
    """The path below the working folder of what `link`, of /proc, leads to; None where it is elsewhere. After
    a snapshot what was open before is in a mount that is nowhere any more, and has a path from its root."""
    path = os.readlink(link)
    for tried in (path, template.WORK + path):
        try:
            found = os.stat(tried)
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (state.st_dev, state.st_ino) or tried != path:
            below = tried == template.WORK or tried.startswith(template.WORK + "/")
            return tried.rstrip("/") if below else None
    return None
