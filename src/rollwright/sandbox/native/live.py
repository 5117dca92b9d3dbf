"""Pid 1 of a sandbox whose interpreter can be forked as it is: variables and files branch.

Role: `inside.Agent` with what live forks need. Neighbours: `zygote` makes it in the mode live, `branching` is
the interpreter's part, `place` leads both. Invariants: standard library only; agents' code gets no user
namespace and one capability, CAP_SYS_CHROOT, in a tree of mounts that holds the user's root and nothing else;
a branch's files, database and programs are answered by a pid 1 of its own, never by the forked interpreter.

A branch is a sandbox of its own, made from a snapshot, and the fork of its parent's interpreter, a *guest*:
it is a child of the parent's pid 1 and has the branch's root as its root. So memory, number of processes and
life are the parent's (a guest ends with the sandbox whose interpreter was forked first), everything else is
the branch's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
from collections.abc import Callable
from typing import Any, ClassVar

from rollwright.sandbox import confine, worker
from rollwright.sandbox.native import kernel, template
from rollwright.sandbox.native.branching import Branching
from rollwright.sandbox.native.inside import OPERATIONS, Agent, Order
from rollwright.sandbox.native.layers import Layers
from rollwright.sandbox.seccomp import Filter, Profile

GUESTS = 64
"""Live forks that one sandbox holds at most, its forks' forks counted; they have a process each."""
_INTERPRETER = "interpreter"


class LiveAgent(Agent):
    """See the module."""

    def __init__(self, order: Order, scope: confine.Scope) -> None:
        super().__init__(order, scope)
        self._filter = _filter()
        self._layers = Layers(order.limits, order.lowers, always=True)
        self._root: int | None = None  # of own interpreters
        self._spaces: list[int] = []  # mount namespaces, held for the roots in them
        self._guests: set[int] = set()
        self._held: set[int] = set()  # guests that are paused
        self._frozen = False

    def _mount(self) -> None:
        """What is mounted below the user's root from now on is seen in the trees made of it, too."""
        kernel.mount(template.USER, template.USER, None, kernel.BIND | kernel.RECURSIVE)
        kernel.mount(None, template.USER, None, kernel.SHARED)
        super()._mount()

    def _tree(self, processes: int | None) -> int:
        """A descriptor of the user's root in a mount namespace where nothing is above it, with another /proc
        if given: mounts of this one's still come in, and none gets out. Raises `OSError`. This process goes
        there and comes back: a child for it would cost five times as much."""
        here = os.open(template.USER + "/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernel.unshare(kernel.NEWNS)
            kernel.mount(None, "/", None, kernel.RECURSIVE | kernel.SLAVE)
            os.chdir(template.USER)
            kernel.pivot()
            self._spaces.append(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
            if processes is not None:
                kernel.put_on(processes, "/proc")
            return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            try:
                kernel.enter(here, kernel.NEWNS)
            except OSError as error:
                raise RuntimeError("pid 1 is lost between mount namespaces") from error  # ends the sandbox
            os.close(here)

    def _fork(self, kind: str, descriptor: int) -> dict[str, Any]:
        if kind == _INTERPRETER and self._root is None:
            self._root = self._tree(None)
        return super()._fork(kind, descriptor)

    def _renounce(self, kind: str) -> None:
        if kind != _INTERPRETER:
            super()._renounce(kind)
            return
        assert self._root is not None
        os.fchdir(self._root)
        os.chroot(".")

    def _work(self, line: int, kind: str) -> None:
        self._filter.install()
        if kind != _INTERPRETER:
            super()._work(line, kind)
            return
        confine.drop_capabilities(but=confine.SYS_CHROOT)
        branching = Branching(line)
        more = {"let_go": branching.let_go, "branch": branching.branch, "take": branching.take}
        worker.serve(line, kind, self._order.limits["output_bytes"], more)

    def _processes(self) -> tuple[int, int]:
        usual, _ = super()._processes()
        return (usual + GUESTS, 0) if self._guests else (usual, GUESTS)

    def _guest_root(self, descriptor: int) -> tuple[dict[str, Any], list[int]]:
        """A descriptor of a root here for a guest elsewhere, whose /proc is given."""
        return {}, [self._tree(descriptor)]

    def _expect(self) -> tuple[dict[str, Any], list[int]]:
        """An interpreter is about to be forked: what is nobody's child is left alone until `adopt`. Gives a
        descriptor of /proc, for the fork's root."""
        if len(self._guests) + self._forks.expected >= GUESTS:
            raise OSError(errno.EAGAIN, f"a sandbox holds at most {GUESTS} live forks, theirs counted")
        processes = kernel.tree(template.USER + "/proc")
        self._forks.expected += 1
        return {}, [processes]

    def _adopt(self, pid: int) -> None:
        """Take what an interpreter says it has forked as a guest; 0 for nothing."""
        self._forks.expected -= 1
        if pid and pid in self._forks.orphans():
            self._forks.live.add(pid)
            self._guests.add(pid)
        elif pid:
            raise OSError(errno.ESRCH, "the interpreter named a process that is not its fork")

    def _end(self, pid: int) -> dict[str, Any]:
        if not self._guests:
            return super()._end(pid)
        _all(signal.SIGSTOP)  # a fork bomb cannot outrun it
        try:
            return super()._end(pid)
        finally:
            self._guests.discard(pid)
            self._held.discard(pid)
            self._go_on()

    def _freeze(self, frozen: bool, pid: int = 0) -> None:
        """Stop or continue the guest `pid`, or all that is no guest."""
        if pid and frozen:
            self._held.add(pid)
        elif pid:
            self._held.discard(pid)
        else:
            self._frozen = frozen
        _all(signal.SIGSTOP)
        self._go_on()

    def _go_on(self) -> None:
        """After all were stopped."""
        if not self._frozen:
            _all(signal.SIGCONT)
        groups = self._guests - self._held if self._frozen else self._held
        for pid in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT if self._frozen else signal.SIGSTOP)

    operations: ClassVar[dict[str, Callable[..., Any]]] = OPERATIONS | {
        "fork": _fork,
        "end": _end,
        "freeze": _freeze,
        "guest_root": _guest_root,
        "expect": _expect,
        "adopt": _adopt,
    }


@functools.cache
def _filter() -> Filter:
    """What agents' processes have on top of that of pid 1."""
    return Filter(Profile.OWN)


def _all(number: int) -> None:
    """Signal every process here but this one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)
