"""The process that native sandboxes are cloned from: lean, single-threaded, standard library.

Role: pid 1 of a pid namespace that all sandboxes lie in, without any of the host's files. Neighbours:
`launch` starts it, `provider` talks to it over a SEQPACKET pair; each clone becomes `inside.Agent`.
Invariants: it runs no agent code and holds no privilege on the host: it is root of a user namespace that maps
one unprivileged user; when it ends, by itself or by SIGKILL, the kernel ends every sandbox; when the host's
end closes, it ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
from typing import Any

from rollwright.sandbox import confine, lean, worker
from rollwright.sandbox.native import kernel, template
from rollwright.sandbox.native.inside import Agent, Order, attach
from rollwright.sandbox.native.live import LiveAgent
from rollwright.sandbox.seccomp import Filter, Profile

_HOST_USER = 1_900_000_000
"""Who sandboxes are on the host where root starts them: a number that no account has."""
_SPACES = kernel.NEWUSER | kernel.NEWPID | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS


class Zygote:
    """Clones sandboxes and ends them. A nest is a fork of it in a memory cgroup: what is cloned from there is
    born in that group, for moving a process into one takes the kernel up to 20 ms."""

    def __init__(self, control: lean.Line, settings: dict[str, Any]) -> None:
        self._control, self._settings = control, settings
        self._scope = confine.Scope()
        self._agent = LiveAgent if settings["live"] else Agent
        self._ending: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, the request
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Answer until the host is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._serve()

    def _serve(self) -> None:
        self._say(0, pid=os.getpid())
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._control.fileno():
                    self._ended(descriptor)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        """One request; False where there will be no more."""
        data, descriptors = self._control.receive()
        if not data:
            return False
        request = lean.loads(data)
        number, operation = request["n"], request["op"]
        try:
            if operation == "create":
                self._say(number, pid=self._create(request, descriptors))
            elif operation == "nest":
                self._say(number, pid=self._nest(*descriptors))
            elif operation == "end":
                self._end(number, request["pid"])
            elif operation == "attach":
                attach(request["name"], descriptors[0])
                self._say(number)
            elif operation == "tree":
                copy = kernel.tree(f"{template.LAYERS}/{request['name']}")
                self._say(number, [copy])
                os.close(copy)
            else:
                kernel.unmount(f"{template.LAYERS}/{request['name']}")
                os.rmdir(f"{template.LAYERS}/{request['name']}")
                self._say(number)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            self._say(number, text=str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _say(self, number: int, descriptors: list[int] | None = None, **said: Any) -> None:
        self._control.send({"n": number, **said}, descriptors)

    def _nest(self, line: int, group: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._control.detach()
            os.write(group, b"0")
            keep(line)
            Zygote(lean.Line(3), self._settings).serve()
        except BaseException:  # boundary: as below
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)

    def _create(self, request: dict[str, Any], descriptors: list[int]) -> int:
        network = request["network"]
        apart = network == "loopback" or (network == "none" and not self._scope.complete)
        order = Order(
            request["limits"],
            request["lowers"],
            network == "loopback",
            request["counted"],
        )
        agent = self._agent(order, self._scope)  # made here: what a clone makes costs it copies of pages
        pid = kernel.clone(_SPACES | (kernel.NEWNET if apart else 0))
        if pid:
            return pid
        try:
            self._control.detach()
            keep(descriptors[0])
            agent.begin(3)
        except BaseException:  # boundary: to this process's stderr, then the child is gone
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(70)  # never back into the zygote's loop

    def _end(self, number: int, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._say(number, status=0)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._ending[descriptor] = (pid, number)
        self._poll.register(descriptor, select.POLLIN)

    def _ended(self, descriptor: int) -> None:
        pid, number = self._ending.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._say(number, status=0)


def keep(line: int) -> None:
    """Close every descriptor but the standard ones and `line`, which becomes 3."""
    if line != 3:
        os.dup2(line, 3, inheritable=False)
    os.closerange(4, 1 << 20)


def main() -> None:
    """`python -I -S -c '…main()' SOURCE DESCRIPTOR SETTINGS`."""
    control, settings = lean.Line(int(sys.argv[2])), json.loads(sys.argv[3])
    del sys.path[0], sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to answer
    ready, go = os.pipe()
    try:
        outer = _prepare(settings)
        pid = kernel.clone(_SPACES | (kernel.NEWNET if settings["apart"] else 0))
    except OSError as error:
        sys.stderr.write(
            f"this machine does not let it make what it needs ({error}): allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container "
            "its seccomp profile), or choose sandbox.type=landlock\n"
        )
        os._exit(70)
    if pid == 0:
        os.close(go)
        os.read(ready, 1)
        os.close(ready)
        _enter()
        sys.path[:] = [template.USER + path for path in sys.path]
        worker.inherit(settings["environment"] | {"HOME": template.WORK, "TMPDIR": "/tmp"})
        confine.no_new_privileges()
        Filter(Profile.CUTTING if settings["live"] else Profile.OWN).install()
        signal.signal(signal.SIGCHLD, _wake)  # for the agents to be
        zygote = Zygote(control, settings)
        gc.collect()
        gc.freeze()  # else the first collection in a child copies every page
        zygote.serve()
        os._exit(0)
    os.close(control.detach())
    kernel.map_ids(f"/proc/{pid}", (0, outer), (0, outer))
    os.write(go, b"!")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(0 if status == 0 else 70)


def _wake(*_: object) -> None:
    """A child has ended: a handler, so that the wakeup descriptor is written to."""


def _prepare(settings: dict[str, Any]) -> int:
    """Build the template; the user and group, as named here, that sandboxes run as."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        kernel.unshare(kernel.NEWNS)
        with contextlib.suppress(OSError):
            kernel.put(
                "/proc/self/oom_score_adj", "-500"
            )  # workers raise theirs, so that none of ours goes first
        outer = _HOST_USER
    else:
        kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
        kernel.map_ids("/proc/self", (0, user), (0, group))
        outer = 0
    template.build(settings["root"], settings["readable"], settings["devices"], outer)
    os.chdir(settings["root"])
    return outer


def _enter() -> None:
    """In the zygote to be: take the template as root, be nobody on the host, and end with the parent."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.set_dumpable(True)  # lost with the user; without it nobody may map users of a clone
    confine.die_with_parent(0)
    # the template is the working folder; nobody may come there from the host's root
    kernel.mount("proc", "proc", "proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
    kernel.mount("layers", "." + template.LAYERS, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=700,size=1m")
    kernel.mount(".", "." + template.PIVOT, None, kernel.BIND | kernel.RECURSIVE)
    os.chdir("." + template.PIVOT)
    kernel.pivot()
