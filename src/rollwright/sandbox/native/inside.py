"""Pid 1 of a native sandbox: makes its root, forks its workers, touches its files.

Role: what the host talks to inside; it is trusted and runs no agent code. Neighbours: `zygote` clones it,
`place` holds the other end of its line, `worker` is what its children become. Invariants: standard library
only; what an agent's process inherits from it is neither privilege nor descriptor nor a way out of `USER`;
a sealed layer is never written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from rollwright.sandbox import confine, files, lean, worker
from rollwright.sandbox.archive import Bounds
from rollwright.sandbox.forks import Forks
from rollwright.sandbox.native import kernel, memory, template
from rollwright.sandbox.native.layers import Layers

_FLAGS = kernel.NOSUID | kernel.NODEV
_SIOCSIFFLAGS, _UP = 0x8914, 1
_WORK = template.USER + template.WORK


class Order(NamedTuple):
    """What a sandbox is to be."""

    limits: dict[str, Any]
    """`Limits` as plain values."""
    lowers: list[str]
    """Layers it begins with, below `LAYERS`, the newest first."""
    loopback: bool
    """Whether it has a network namespace with a loopback of its own."""
    counted: bool
    """Whether a cgroup counts its memory."""


class Agent:
    """One sandbox from inside."""

    operations: ClassVar[dict[str, Callable[..., Any]]]

    def __init__(self, order: Order, scope: confine.Scope) -> None:
        self._order, self._scope = order, scope
        self._layers = Layers(order.limits, order.lowers)
        limits = order.limits
        self._bounds = Bounds(limits["disk_bytes"], limits["files"], limits["file_bytes"])

    def begin(self, line: int) -> None:
        """Be pid 1 of the namespaces this process was cloned into: make the sandbox, then answer on
        `line`."""
        self._line = lean.Line(line)
        self._forks = Forks(template.USER + "/proc")
        kernel.map_ids("/proc/self", (template.UID, 0), (template.UID, 0))
        self._mount()
        kernel.put("/proc/sys/user/max_user_namespaces", "0")
        if self._order.loopback:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _UP))
        else:
            self._scope.close()
        socket.sethostname("sandbox")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the host is gone
            self._serve()

    def _mount(self) -> None:
        """The sandbox's own files and its /proc."""
        self._layers.mount()
        kernel.mount("proc", template.USER + "/proc", "proc", _FLAGS | kernel.NOEXEC)

    def _serve(self) -> None:
        """Answer until the host is gone. Orphans that end are waited for, so that none counts as a
        process."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.register(woken, select.POLLIN)
        self._line.send({"n": 0})
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 512)
                    self._forks.bury()
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        data, descriptors = self._line.receive()
        if not data:
            return False
        request = lean.loads(data)
        number, operation, carried = request.pop("n"), request.pop("op"), request.pop("carried", False)
        said: dict[str, Any] = {"n": number}
        given: list[int] = []
        try:
            if carried:
                request["data"] = memory.held(descriptors[0])
            elif descriptors:
                request["descriptor"] = descriptors[0]
            result = self.operations[operation](self, **request)
            if isinstance(result, bytes):
                given.append(memory.hold(result))
            elif isinstance(result, tuple):
                said |= result[0]
                given += result[1]
            elif result is not None:
                said |= result
        except OSError as error:
            said |= {"errno": error.errno or errno.EIO, "text": error.strerror or str(error)}
        except (ValueError, MemoryError, RecursionError) as error:
            said |= {"errno": errno.EINVAL, "text": f"{type(error).__name__}: {error}"}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._line.send(said, given)
        for descriptor in given:
            os.close(descriptor)
        return True

    def _rotate(self, first: bool) -> tuple[dict[str, Any], list[int]]:
        """Seal what there is; the `first` time with a descriptor of all layers."""
        return self._layers.rotate(), [kernel.tree(template.OWN)] if first else []

    def _fork(self, kind: str, descriptor: int) -> dict[str, Any]:
        return {"pid": self._forks.fork(lambda: self._become(kind, descriptor))}

    def _become(self, kind: str, descriptor: int) -> None:
        """In the child: give everything up, then serve."""
        signal.set_wakeup_fd(-1)
        os.setsid()
        limits = self._order.limits
        if self._order.counted:
            kernel.put("/proc/self/oom_score_adj", "500")
        if kind != "interpreter":
            kernel.set_dumpable(False)  # agent code, of the same user, cannot look into it through /proc
        self._renounce(kind)
        sys.path[:] = [path.removeprefix(template.USER) for path in sys.path]
        os.chdir(template.WORK)
        self._line.detach()
        line = worker.keep_only(os.open("/dev/null", os.O_RDWR), descriptor)
        confine.limit_resources(
            limits["cpu_seconds"],
            limits["memory_bytes"],
            limits["file_bytes"],
            *self._processes(),
        )
        self._work(line, kind)

    def _processes(self) -> tuple[int, int]:
        """How many a worker may be one of, pid 1 counted, and by how many it may raise that."""
        return self._order.limits["processes"] + 1, 0

    def _renounce(self, kind: str) -> None:
        """Have the user's root as the root."""
        os.chroot(template.USER)

    def _work(self, line: int, kind: str) -> None:
        """Be a worker, without privileges."""
        confine.drop_capabilities()
        worker.serve(line, kind, self._order.limits["output_bytes"])

    def _end(self, pid: int) -> dict[str, Any]:
        return {"status": self._forks.end(pid)}

    def _read(self, path: str) -> bytes:
        return files.read_beneath(_WORK, path, self._bounds.file_bytes)

    def _write(self, path: str, data: bytes) -> None:
        files.write_beneath(_WORK, path, data, self._bounds.file_bytes)

    def _list(self, path: str) -> bytes:
        return lean.dumps(files.list_beneath(_WORK, path))

    def _remove(self, path: str) -> None:
        files.remove_beneath(_WORK, path)

    def _upload(self, path: str, data: bytes) -> None:
        files.unpack_beneath(_WORK, data, path, self._bounds)

    def _download(self, path: str) -> bytes:
        return files.pack_beneath(_WORK, path, self._bounds)

    def _restore(self, lowers: list[str]) -> None:
        self._layers.restore(lowers)

    def _attach(self, name: str, descriptor: int) -> None:
        attach(name, descriptor)

    def _ping(self) -> None:
        """It stands."""

    def _freeze(self, frozen: bool) -> None:
        """Stop or continue every process but this one: a signal to all reaches what is being forked too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP if frozen else signal.SIGCONT)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "fork": Agent._fork,
    "end": Agent._end,
    "read": Agent._read,
    "write": Agent._write,
    "list": Agent._list,
    "remove": Agent._remove,
    "upload": Agent._upload,
    "download": Agent._download,
    "rotate": Agent._rotate,
    "restore": Agent._restore,
    "attach": Agent._attach,
    "freeze": Agent._freeze,
    "ping": Agent._ping,
}
"""Name → what does it."""
Agent.operations = OPERATIONS


def attach(name: str, descriptor: int) -> None:
    """Put a ground, given as a mount, where layers are looked for."""
    target = f"{template.LAYERS}/{name}"
    with contextlib.suppress(FileExistsError):  # all sandboxes have the folder that one of them made
        os.mkdir(target)
    kernel.attach(descriptor, target)
