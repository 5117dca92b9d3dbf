"""An event loop in a thread, for callers that block.

Role: runs coroutines of sandboxes for `sync`. Neighbours: `sync` alone. Invariants: what was begun ends
before the thread does; a call that is interrupted is cancelled, and what it gave all the same is undone; a
copy in a forked process, which has no such thread, refuses instead of hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as settled
from typing import Any, Generic, TypeVar

from rollwright.clock import GRACE_SECONDS
from rollwright.errors import SandboxLost

T = TypeVar("T")
Work = Coroutine[Any, Any, T]


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._door = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def here(self) -> bool:
        """Whether this process started it: a thread does not go along into a fork."""
        return os.getpid() == self._process

    def start(self) -> None:
        """Run the loop."""
        ready = threading.Event()

        def turn() -> None:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                ready.set()
                self._loop.run_forever()

        self._process = os.getpid()
        self._thread = threading.Thread(target=turn, name="rollwright-sandboxes", daemon=True)
        self._thread.start()
        ready.wait()

    def _begin(self, call: Call[Any]) -> None:
        with self._door:  # what passes it is on the loop before the loop is told to stop
            if self._loop is None or not self.here:
                call.work.close()
                raise SandboxLost("closed, not started, or made by another process: start one here")
            call.loop = self._loop
            self._loop.call_soon_threadsafe(call.start)

    def run(self, work: Work[T], undo: Callable[[T], Work[None]] | None = None) -> T:
        """What `work` gives; interrupted, it is cancelled, and `undo` gets what it gave all the same. Raises
        `SandboxLost` where the loop has ended."""
        call = Call(work, undo)
        try:
            self._begin(call)
            call.wait()
        except BaseException:  # boundary: Ctrl-C; raised on
            call.give_up()
            raise
        return call.result()

    def finish(self, work: Work[T]) -> T:
        """What `work` gives; interrupted, it goes on, and the interrupt is raised when it has ended. A second
        interrupt is raised at once. Raises as `run`."""
        call = Call(work, None)
        try:
            self._begin(call)
            call.wait()
        except SandboxLost:
            raise
        except BaseException:  # boundary: Ctrl-C; raised on
            self._begin(call)
            call.wait()
            raise
        return call.result()

    def stop(self) -> None:
        """End loop and thread; calls under way are cancelled."""
        with self._door:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            self._thread.join()


class Call(Generic[T]):
    """One coroutine on the loop, waited for from another thread."""

    def __init__(self, work: Work[T], undo: Callable[[T], Work[None]] | None) -> None:
        self.work = work
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where it was begun."""
        self._undo = undo
        self._outcome: Future[T] = Future()
        self._abandoned: Future[None] = Future()
        """Done when nothing of a call that was given up is left to do."""
        self._tasks: list[asyncio.Task[Any]] = []

    # On the loop.

    def start(self) -> None:
        """Make the task, once: an interrupted caller may not know that it did begin."""
        if not self._tasks:
            task = asyncio.get_running_loop().create_task(self.work)
            self._tasks.append(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._outcome.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())

    def _abandon(self) -> None:
        if not self._tasks:  # interrupted before it began
            self.work.close()
            self._abandoned.set_result(None)
            return
        (task,) = self._tasks
        task.cancel()
        self._tasks.append(asyncio.get_running_loop().create_task(self._settle(task)))

    async def _settle(self, task: asyncio.Task[T]) -> None:
        try:
            await asyncio.wait([task])
            if self._undo is not None and not task.cancelled() and task.exception() is None:
                await self._undo(task.result())
        finally:
            self._abandoned.set_result(None)

    # In the caller's thread.

    def wait(self) -> None:
        """Until it has ended."""
        settled([self._outcome])

    def result(self) -> T:
        """What it gave. Raises `SandboxLost` where the loop ended under it."""
        try:
            return self._outcome.result()
        except CancelledError as error:
            raise SandboxLost("closed under the call") from error

    def give_up(self) -> None:
        """Cancel it, undo what it gave all the same, and wait a moment for that."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the call with it
                self.loop.call_soon_threadsafe(self._abandon)
                settled([self._abandoned], GRACE_SECONDS)
