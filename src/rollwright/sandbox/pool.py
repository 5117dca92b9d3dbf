"""A few blank sandboxes ready before anybody asks.

Role: a provider around any other, which has the waiting done in the background. Neighbours: the rollout
factory creates through it; `lent` is what it gives out. Invariants: a sandbox is given out once and never
taken back; each is asked whether it lives before it is given out; never more than the provider's `capacity`
are alive or being made, and blank ones give way to whoever needs the room; what fails in the background is
tried again ever later, counted, and told with the next create that fails; after `close` nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from rollwright.clock import Clock, SystemClock
from rollwright.errors import ConfigError, LeaseRevoked, SandboxLost
from rollwright.pool.base import Lease
from rollwright.sandbox.base import (
    GuaranteeName,
    Guarantees,
    Limits,
    Sandbox,
    SandboxProvider,
    Snapshot,
    State,
)
from rollwright.sandbox.lent import Lent
from rollwright.types import Environment

_PING_SECONDS = 2.0
_AT_ONCE = 4
"""Blank sandboxes that are made at the same time, at most."""
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.1, 30.0
_LOOK_SECONDS = 1.0
"""How often room is looked for that nobody told of: a sandbox whose time was up."""
_EASE_SECONDS = 30.0
"""So long without a create that found nothing ready, one less is kept, down to `min_idle`."""


@runtime_checkable
class Warm(Protocol):
    """What a sandbox offers that can be made before it is known what for."""

    async def ping(self) -> None:
        """A round trip to whatever answers its calls. Raises `SandboxLost` where that is gone."""

    async def adopt(self, environment: Environment, owner: str) -> None:
        """Once, before it is used: put in files and database, and write down its owner.

        Raises:
            SandboxError: the environment's SQL failed; the sandbox is spent.
            SandboxLost: it died.
        """


class PoolStats(Struct, frozen=True, kw_only=True):
    """What the pool has done."""

    idle: int
    """Ready now."""
    live: int
    """Given out and not killed."""
    hits: int
    """Creates that found one ready."""
    misses: int
    """Creates that could have used one and found none."""
    passed: int
    """Creates that asked for what no blank sandbox has: a snapshot, a network, other limits."""
    died: int
    """Found dead when they were to be given out."""
    failed: int
    """Times that none could be made in the background."""
    failure: str = ""
    """Why, the last time."""


class SandboxPool:
    """See `SandboxProvider`. Keeps `min_idle` blank sandboxes of `provider` ready; with every create that
    finds none ready one more, up to `max_idle`.

    Args:
        provider: what makes them; the pool owns it: starts and closes it.
        lease: the machine's, if it may be called back.
        clock: of retries and of easing.

    Raises:
        ConfigError: not 0 ≤ min_idle ≤ max_idle.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        min_idle: int,
        max_idle: int,
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= min_idle <= max_idle:
            raise ConfigError(
                f"min_idle = {min_idle}, max_idle = {max_idle}: expected 0 ≤ min_idle ≤ max_idle"
            )
        self._provider, self._lease, self._clock = provider, lease, clock or SystemClock()
        self._least, self._most, self._target = min_idle, max_idle, min_idle
        self._idle: deque[Sandbox] = deque()
        self._lent: dict[str, Lent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._making = 0
        """Being made in the background."""
        self._waiting = 0
        """Room that somebody is waiting for."""
        self._retry_at = self._ease_at = self._timer_at = 0.0
        self._in_a_row = 0
        """Failures in the background since the last success."""
        self._open = self._revoked = False
        self._poolable = True
        self._hits = self._misses = self._passed = self._died = self._failed = self._number = 0
        self._failure: Exception | None = None

    async def start(self) -> None:
        await self._provider.start()
        self._open = True
        self._tend()

    @property
    def guarantees(self) -> Guarantees:
        return self._provider.guarantees

    @property
    def capacity(self) -> int:
        return self._provider.capacity

    @property
    def live(self) -> int:
        """Given out and not killed; blank ones give way, so they don't count."""
        self._forget_dead()
        return len(self._lent)

    @property
    def stats(self) -> PoolStats:
        """What it has done so far."""
        failure = self._failure
        return PoolStats(
            idle=len(self._idle),
            live=self.live,
            hits=self._hits,
            misses=self._misses,
            passed=self._passed,
            died=self._died,
            failed=self._failed,
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
        )

    async def create(
        self,
        environment: Environment | None = None,
        *,
        owner: str,
        limits: Limits | None = None,
        snapshot: Snapshot | None = None,
        network: str = "none",
        require: Sequence[GuaranteeName] = (),
    ) -> Sandbox:
        if self._lease is not None:
            self._lease.check()
        self._check_open()
        special = snapshot is not None or network != "none" or bool(self.guarantees.missing(require))
        if special or not self._poolable:
            self._passed += 1
        else:
            while (blank := self._blank(limits)) is not None:
                if await self._prepared(blank, environment or Environment(), owner):
                    self._hits += 1
                    return self._lend(blank)
            self._missed(limits)
        await self._make_room(1)
        try:
            return self._lend(
                await self._provider.create(
                    environment,
                    owner=owner,
                    limits=limits,
                    snapshot=snapshot,
                    network=network,
                    require=require,
                )
            )
        except Exception as error:  # boundary: raised on, with what the pool saw before
            if self._in_a_row and self._failure is not None:
                error.add_note(f"{self._in_a_row} tries in the background failed before: {self._failure}")
            raise
        finally:
            self._room_taken(1)

    async def connect(self, id: str) -> Sandbox:
        self._check_open()
        if any(blank.id == id for blank in self._idle):
            raise SandboxLost(f"sandbox {id}: nobody owns it")
        found = self._lent.get(id)
        return found if found is not None else self._lend(await self._provider.connect(id))

    async def load(self, path: Path) -> Snapshot:
        return await self._provider.load(path)

    async def close(self) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        self._idle.clear()
        await self._provider.close()
        self._forget_dead()

    async def forked(self, sandbox: Sandbox, count: int, live: bool) -> list[Sandbox]:
        """Fork, with room made for it: for `Lent`."""
        await self._make_room(count)
        try:
            return [self._lend(each) for each in await sandbox.fork(count, live=live)]
        finally:
            self._room_taken(count)

    def ended(self, id: str) -> None:
        """A sandbox that was given out is killed: for `Lent`."""
        self._lent.pop(id, None)
        self._tend()

    def _lend(self, sandbox: Sandbox) -> Lent:
        if len(self._lent) >= self.capacity:
            self._forget_dead()
        lent = self._lent[sandbox.id] = Lent(sandbox, self)
        return lent

    def _forget_dead(self) -> None:
        """Those whose time was up, or that were killed past us."""
        for id in [id for id, each in self._lent.items() if each.info().state is State.KILLED]:
            del self._lent[id]

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxLost("the sandbox pool is not open: it was closed, or start() was not called")

    def _blank(self, limits: Limits | None) -> Sandbox | None:
        """The oldest that is ready, with those limits; no longer the pool's."""
        if self._idle and (limits is None or limits == self._idle[0].limits):
            return self._idle.popleft()
        return None

    def _missed(self, limits: Limits | None) -> None:
        if self._idle:  # they have other limits
            self._passed += 1
            return
        self._misses += 1
        self._target = min(self._target + 1, self._most)
        self._ease_at = self._clock.now() + _EASE_SECONDS

    async def _prepared(self, blank: Sandbox, environment: Environment, owner: str) -> bool:
        """Whether it lives and is somebody's now. However this ends, it is given out or killed."""
        assert isinstance(blank, Warm)
        good = False
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await blank.ping()
            await blank.adopt(environment, owner)
            if blank.limits.wall_seconds is not None:
                await blank.set_timeout(blank.limits.wall_seconds)
            good = True
        except (SandboxLost, TimeoutError):
            self._check_open()
            self._died += 1
        finally:
            if not good:
                self._spawn(self._kill(blank))
            self._tend()
        return good

    async def _make_room(self, count: int) -> None:
        """Let blank ones go until there is room for `count` more, and keep it free; `_room_taken` ends that.
        Where there are none left, the provider makes the caller wait."""
        self._waiting += count
        try:
            while self._idle and self._provider.live + self._waiting > self.capacity:
                await asyncio.shield(self._spawn(self._kill(self._idle.pop())))
        except BaseException:  # boundary: nobody waits for it any more
            self._room_taken(count)
            raise

    def _room_taken(self, count: int) -> None:
        self._waiting -= count
        self._tend()

    def _tend(self) -> None:
        """Bring what is ready to what it should be, as far as that goes now; called when anything changed."""
        if not self._open:
            return
        now = self._clock.now()
        while self._target > self._least and now >= self._ease_at:
            self._target, self._ease_at = self._target - 1, self._ease_at + _EASE_SECONDS
        while len(self._idle) > (0 if self._revoked else self._target):
            self._spawn(self._kill(self._idle.pop()))
        while self._wanted and self._has_room and self._making < _AT_ONCE and now >= self._retry_at:
            self._making += 1
            self._spawn(self._make())
        self._set_timer(now)

    @property
    def _wanted(self) -> bool:
        return self._poolable and len(self._idle) + self._making < self._target

    @property
    def _has_room(self) -> bool:
        return self._provider.live + self._making + self._waiting < self.capacity

    def _set_timer(self, now: float) -> None:
        """Look again when something is due that nobody will tell of."""
        due = []
        if self._target > self._least:
            due.append(self._ease_at)
        if self._wanted and now < self._retry_at:
            due.append(self._retry_at)
        elif self._wanted and not self._has_room:
            due.append(now + _LOOK_SECONDS)
        if due and (self._timer is None or min(due) < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = min(due)
            self._timer = self._spawn(self._later(max(0.001, self._timer_at - now)))

    async def _later(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._timer = None
        self._tend()

    async def _make(self) -> None:
        """One blank sandbox."""
        self._number += 1
        made: Sandbox | None = None
        try:
            made = await self._provider.create(owner=f"idle/{self._number}")
            if made.limits.wall_seconds is not None:
                await made.set_timeout(None)  # its time begins when it is given out
        except Exception as error:  # boundary: counted, tried again, told with the next create that fails
            self._failure, self._failed, self._in_a_row = error, self._failed + 1, self._in_a_row + 1
            self._revoked = isinstance(error, LeaseRevoked)
            wait = min(_LAST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2.0 ** min(self._in_a_row - 1, 20))
            self._retry_at = self._clock.now() + wait
            if made is not None:
                self._spawn(self._kill(made))
        else:
            self._in_a_row, self._revoked = 0, False
            self._poolable = isinstance(made, Warm)
            crowded = self._waiting and self._provider.live + self._waiting > self.capacity
            if self._poolable and self._open and not crowded:
                self._idle.append(made)
            else:
                self._spawn(self._kill(made))
        finally:
            self._making -= 1
            self._tend()

    async def _kill(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.kill()
        except Exception as error:  # boundary: `close` of the provider ends it; counted
            self._failure, self._failed = error, self._failed + 1
        self._tend()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
